"""Commands that are killed at any file they bring to disk, or find no HOME, TMPDIR or names in ASCII."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from command_line import MODEL, output_of, run_process
from end_to_end.tiny_llms import target, tokenizer
from forked import ForkedCommand

HEAD = "models/tinycode-medusa"
# Arguments by command, {out} and {in} being places; what is made, and how many files are brought to disk at least.
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], int]] = {
    "convert": (("convert", HEAD, "{out}", "--to", "medusa", "--safetensors"), ("",), 2),
    "data": (("data", MODEL, "--text", "{in}/texts", "--out", "{out}"), ("",), 4),
    "data index": (("data", "index", "{in}/data", "--out", "{out}"), ("",), 2),
    "twin": (
        ("twin", "{in}/small", "{out}", "--layers", "4", "--hidden-size", "32", "--heads",
         "{in}/small-medusa"),
        ("", "-medusa"), 4,
    ),
    "tune tree": (
        ("tune", "tree", MODEL, "-s", "medusa", "--out", "{out}", "--num-prompts", "1", "--max-tokens", "6"), ("",), 1,
    ),
    "train": (
        ("train", "medusa", MODEL, "--data", "{in}/data", "--out", "{out}", "--steps", "2", "--length", "8",
         "--batch-size", "2", "--num-prompts", "0", "--eval-every", "0", "--save-every-s", "0"),
        ("",), 4,
    ),
}  # fmt: skip


# Kills the process at a call of `fsync`, before it.
KILL = """
import os, signal
fsync, calls = os.fsync, [0]
def counted(descriptor):
    calls[0] += 1
    if calls[0] == {number}:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
os.fsync = counted
"""


def run_killed(arguments: list[str], number: int, *, setup: str = "") -> tuple[int, str]:
    """Exit code, negative for a signal, and standard error; number: the how manieth file on its way to disk, from 1."""
    with ForkedCommand(*arguments, setup=KILL.format(number=number) + setup) as process:
        _, errors = process.communicate()
        return process.wait(), errors


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, their tokens, and a tiny target with a head."""
    import torch

    from foretoken.formats import native
    from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
    from foretoken.formats.conversion import head_shapes
    from foretoken.heads.medusa import MedusaConfig
    from foretoken.models.loading import load_model

    place = tmp_path_factory.mktemp("given")
    (place / "texts").mkdir()
    for number in range(20):
        (place / "texts" / f"{number}.py").write_text(f"value_{number} = [{number}, {number * 3}]\n" * 4)
    output_of("data", MODEL, "--text", str(place / "texts"), "--out", str(place / "data"))
    target().save_pretrained(place / "small")
    tokenizer().save_pretrained(place / "small")
    loaded = load_model(str(place / "small"), device="cpu")
    config = MedusaConfig(hidden_size=32, vocab_size=loaded.vocab_size, num_heads=2)
    weights = {key: torch.full(shape, 0.01) for key, shape in head_shapes(config).items()}
    checkpoint = HeadCheckpoint(config=config, weights=weights, target=TargetFingerprint.of(loaded))
    native.write_checkpoint(checkpoint, place / "small-medusa")
    return place


def contents(made: Path) -> dict[str, bytes] | bytes | None:
    """What lies in a place; None for nothing."""
    if made.is_dir():
        return {str(path.relative_to(made)): path.read_bytes() for path in sorted(made.rglob("*")) if path.is_file()}
    return made.read_bytes() if made.exists() else None


def places(out: Path, suffixes: tuple[str, ...]) -> list[dict[str, bytes] | bytes | None]:
    return [contents(out.with_name(f"{out.name}{suffix}")) for suffix in suffixes]


@pytest.mark.parametrize(
    "name", [name if name == "data index" else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]
)
def test_killed_at_every_file(name: str, given: Path, tmp_path: Path) -> None:
    wanted, suffixes, least = COMMANDS[name]
    out = tmp_path / "killed" / "out"
    out.parent.mkdir()
    arguments = [each.format(**{"out": out, "in": given}) for each in wanted]
    killed, states = 0, []
    while True:
        code, errors = run_killed(arguments, killed + 1)
        states.append(places(out, suffixes))
        if code != -signal.SIGKILL:
            break
        killed += 1
        assert killed < 60, "it never ends"
        if None not in states[-1]:
            break  # all is in its place, and only what follows was cut off
    assert code in (0, -signal.SIGKILL), errors
    assert killed >= least
    undisturbed = tmp_path / "left alone" / "out"
    undisturbed.parent.mkdir()
    code, errors = run_killed([each.format(**{"out": undisturbed, "in": given}) for each in wanted], 0)
    assert code == 0, errors
    whole = places(undisturbed, suffixes)
    for state in states[:-1]:
        for found, part in zip(state, whole, strict=True):
            assert found is None or _same(found, part, undisturbed, out)
    assert all(_same(found, part, undisturbed, out) for found, part in zip(states[-1], whole, strict=True))


def _same(found: Any, whole: Any, undisturbed: Path, out: Path) -> bool:
    """Whether two places hold the same but for their own names and dates."""
    if isinstance(found, dict) and isinstance(whole, dict):
        weights = [key for key in whole if not key.endswith((".json", ".md", ".jsonl"))]
        return found.keys() == whole.keys() and all(found[key] == whole[key] for key in weights)
    return bool(found == whole)


@pytest.mark.slow
@pytest.mark.parametrize("home", ["HOME to read alone", "no HOME"])
def test_without_the_usual_places(home: str, given: Path, tmp_path: Path) -> None:
    """In a process of its own, with nothing kept from others: it answers, and says at most what is not kept.

    The places of HOME and of TMPDIR are independent, so each of the two has one run with every value.
    """
    unset = ("FORETOKEN_CACHE", "XDG_CACHE_HOME", "HOME", "TMPDIR")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    if home == "no HOME":
        environment |= {"FORETOKEN_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "nowhere")}
    else:
        environment["HOME"] = "/proc/self"
    done = run_process(
        "-m", "foretoken", "generate", str(given / "small"), "-p", "a b", "--max-tokens", "2", "--runner", "generic",
        env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def test_paths_outside_ascii(given: Path, tmp_path: Path) -> None:
    """Models, heads, texts, prompts and everything that is written."""
    place = tmp_path / "Модель é 漢字 🚀"
    place.mkdir()
    shutil.copytree(given / "small", place / "μ")
    shutil.copytree(given / "small-medusa", place / "μ-medusa")
    shutil.copytree(given / "texts", place / "тексты")
    (place / "п.txt").write_text("a b a b")
    trace = place / "сл.jsonl"
    for arguments in (
        ("generate", place / "μ", "-f", place / "п.txt", "-s", "medusa", "--max-tokens", "3", "--trace", trace),
        ("report", trace, "--out", place / "ς.html"),
        ("convert", place / "μ-medusa", place / "ĥ", "--to", "vllm_medusa", "--target", place / "μ"),
        ("inspect", place / "ĥ", "--verify", "--target", place / "μ"),
        ("data", place / "μ", "--text", place / "тексты", "--out", place / "д"),
        ("data", "index", place / "д", "--out", place / "й"),
        ("train", "medusa", place / "μ", "--data", place / "д", "--out", place / "ж", "--steps", "1", "--length", "8",
         "--batch-size", "1", "--num-prompts", "0"),
    ):  # fmt: skip
        output_of(*map(str, arguments))
