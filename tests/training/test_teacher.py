"""Features of the teacher: those that a target in integers verifies with, and their cache on disk.

The cache is bounded, damaged entries are made anew, and a run with it is the same as one without.
"""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import training_runs
from models.gguf_files import tiny_file
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, tiny_model

from foretoken.core.passes import Pass, Tap
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.models.loading import load_model, wrap_model
from foretoken.models.parts import target_parts
from foretoken.models.smaller import unpacked_model
from foretoken.runner.runner import Runner
from foretoken.training.doctor.checks import check_logits, check_serving, check_taps
from foretoken.training.run import _features
from foretoken.training.teacher import FeatureCache, Teacher

ENTRY = torch.arange(600, dtype=torch.float32).view(2, 10, 30)
ENTRY_BYTES = 2400
HEADER_BYTES = 200  # at most, of one small safetensors file


def cache(directory: Path, key: str = "key", max_bytes: int = 10 * ENTRY_BYTES) -> FeatureCache:
    return FeatureCache(directory, key=key, max_bytes=max_bytes)


def bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_entries_come_back_and_only_under_their_key(tmp_path: Path) -> None:
    one = cache(tmp_path)
    assert one.get("a") is None
    one.put("a", ENTRY)
    one.put("b", 2 * ENTRY)
    for opened in (one, cache(tmp_path)):
        a, b = opened.get("a"), opened.get("b")
        assert a is not None
        assert b is not None
        assert torch.equal(a, ENTRY)
        assert torch.equal(b, 2 * ENTRY)
    assert cache(tmp_path, "other key").get("a") is None


def test_bounded_also_when_opened_again(tmp_path: Path) -> None:
    first = cache(tmp_path, max_bytes=4 * ENTRY_BYTES)
    for name in "abc":
        first.put(name, ENTRY)
    again = cache(tmp_path, max_bytes=4 * ENTRY_BYTES)
    for name in "defg":
        again.put(name, ENTRY)
    kept = [name for name in "abcdefg" if again.get(name) is not None]
    assert kept[:3] == ["a", "b", "c"]
    assert 3 <= len(kept) <= 4
    assert bytes_of(tmp_path) <= 4 * (ENTRY_BYTES + HEADER_BYTES)


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "another name"])
def test_damaged_entries_are_none_and_can_be_made_anew(tmp_path: Path, damage: str) -> None:
    store = cache(tmp_path)
    store.put("a", ENTRY)
    (path,) = tmp_path.rglob("a.safetensors")
    whole = path.read_bytes()
    if damage == "another name":
        save_file({"something": ENTRY}, path)
    else:
        path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "garbage": b"\xff" * 4096}[damage])
    assert store.get("a") is None
    store.put("a", ENTRY)
    again = store.get("a")
    assert again is not None
    assert torch.equal(again, ENTRY)


@pytest.mark.parametrize("call", ["os.open", "foretoken.training.teacher.save_file"])
def test_a_full_disk_costs_only_time(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = cache(tmp_path)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(call, full)
        store.put("a", ENTRY)
        store.put("b", ENTRY)
    assert store.get("a") is None
    assert caplog.text.count("No space left on device") == 1
    assert bytes_of(tmp_path) == 0


@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2", "bamba", "nemotron_h"])
def test_recurrent_layers_are_read_as_they_are_verified(architecture: str) -> None:
    """Features of whole texts by transformers, whose Mamba2 clamps steps there, and of trees behind a prompt."""
    model = wrap_model(tiny_model(architecture), name=architecture)
    assert target_parts(model).final_norm is not None
    taps: tuple[Tap, ...] = (1, 2, "final")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCAB_SIZE, (2, 24), generator=generator)
    read = Teacher(model, taps).read_features(tokens)
    runner = Runner(model, num_slots=2, context_len=40, taps=taps)
    assert runner.name == "lean-native"
    tree = TokenTree.from_rows([TreeRow(row, range(-1, 14)) for row in tokens[:, 9:].tolist()])
    prompts = Pass.of_chains(tokens[:, :9].tolist(), slots=[0, 1], prefix_lens=[0, 0])
    for work, places in ((prompts, slice(9)), (runner.verification([0, 1], [9, 9], tree), slice(9, 24))):
        features, theirs = runner.run(work).features, read[:, places].flatten(0, 1)
        assert features is not None
        assert float((features.flatten(1) - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sequences of every batch whose features the target computes."""
    found: list[int] = []
    features = Teacher.features

    def watched(self: Teacher, tokens: torch.Tensor) -> torch.Tensor:
        found.append(len(tokens))
        return features(self, tokens)

    monkeypatch.setattr(Teacher, "features", watched)
    return found


def test_cached_runs_are_the_same_run(tmp_path: Path, computed: list[int]) -> None:
    plain = training_runs.trained(tmp_path / "plain").weights
    kept = tmp_path / "cache"
    training_runs.same_weights(training_runs.trained(tmp_path / "cold", cache=kept).weights, plain)
    computed.clear()
    training_runs.same_weights(training_runs.trained(tmp_path / "warm", cache=kept).weights, plain)
    assert computed == []  # else the test above compares nothing
    damaged = sorted(kept.rglob("*.safetensors"))[2]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    training_runs.same_weights(training_runs.trained(tmp_path / "damaged", cache=kept).weights, plain)
    assert computed == [4]
    tiny = training_runs.trained(tmp_path / "no room", cache=tmp_path / "tiny", cache_bytes=5000)
    training_runs.same_weights(tiny.weights, plain)
    # Another seed cuts other windows.
    computed.clear()
    training_runs.trained(tmp_path / "other seed", cache=kept, seed=1)
    assert computed == [4] * 6


def test_epochs_that_repeat_their_windows_run_no_target(tmp_path: Path, computed: list[int]) -> None:
    """Whatever the size of a batch; heads with the same taps and other batches share the windows."""
    text = replace(training_runs.batches(16 * 8 + 3), repeats_windows=True)  # two batches an epoch
    training_runs.trained(tmp_path / "run", text=text, cache=tmp_path / "cache")
    assert computed == [4, 4]
    training_runs.trained(tmp_path / "hydra", "hydra", text=text, cache=tmp_path / "cache", batch_size=2)
    assert computed == [4, 4]
    moving = replace(text, repeats_windows=False)
    training_runs.trained(tmp_path / "moving", text=moving, cache=tmp_path / "cache")
    assert computed == [4] * 6


@pytest.mark.native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("taps", [("final",), (0, 1), (1, "final")])
def test_features_are_those_of_the_runner_that_verifies(taps: tuple[Tap, ...], dtype: str, tmp_path: Path) -> None:
    """To the bit, after batches of other sizes too; those of the unpacked weights differ by rounding."""
    stored = load_model(tiny_file(tmp_path / "tiny.gguf"), dtype=dtype)
    assert stored.quantization is not None
    model = unpacked_model(stored)
    teacher = Teacher(model, taps)
    generator = torch.Generator().manual_seed(0)
    for size in ((2, 9), (1, 5), (3, 12), (2, 9)):
        tokens = torch.randint(model.vocab_size, size, generator=generator)
        found = teacher.read_features(tokens)
        all_taps = taps if taps[-1] == "final" else (*taps, "final")
        runner = Runner(stored, num_slots=4, context_len=32, taps=all_taps)
        for row, text in enumerate(tokens.tolist()):
            features = runner.run(Pass.of_chains([text], slots=[3], prefix_lens=[0])).features
            assert features is not None
            assert torch.equal(found[row], features.flatten(1).to(model.dtype))
        assert torch.equal(teacher.features(tokens), found[..., -model.config.hidden_size :])
        unpacked = Teacher(replace(model, stored=None), taps).read_features(tokens)
        assert (found.float() - unpacked).norm() < unpacked.norm() * (1e-5 if dtype == "float32" else 0.02)
        assert not found.is_inference()
        assert found.dtype == model.dtype == torch.float32


@pytest.mark.native
def test_kept_features_are_those_of_the_dtype_that_serves(tmp_path: Path) -> None:
    """The unpacked weights are in float32 whatever serves, and one folder holds both."""
    kept = []
    for dtype in ("bfloat16", "float32"):
        model = unpacked_model(load_model(tiny_file(tmp_path / f"{dtype}.gguf"), dtype=dtype))
        settings = replace(training_runs.settings(tmp_path / "run"), cache=tmp_path / "cache")
        _features(model, settings)(0, torch.arange(16).view(1, 16))
        kept.append({load_file(file)["features"].dtype for file in (tmp_path / "cache").rglob("*.safetensors")})
    assert kept == [{torch.bfloat16}, {torch.bfloat16, torch.float32}]


@pytest.mark.native
def test_the_doctor_compares_what_is_served_with_the_weights_in_torch(tmp_path: Path) -> None:
    """Within the rounding of the served model; the LM head on a training feature is exact for the unpacked weights."""
    model = unpacked_model(load_model(tiny_file(tmp_path / "tiny.gguf"), dtype="bfloat16"))
    tokens = torch.arange(20).view(1, 20)
    checks = [
        check_logits(model, tokens),
        *check_serving(model, tokens, "auto"),
        check_taps(model, tokens, (0, 1), "auto"),
    ]
    assert [(each.name, each.verdict) for each in checks] == [
        ("target logits", "ok"), ("tree logits", "ok"), ("target served", "ok"), ("taps served", "ok"),
    ]  # fmt: skip
    assert checks[0].value < 1e-5 < checks[2].value < 0.05
