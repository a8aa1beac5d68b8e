"""Files that are damaged, hostile, split, or no head at all: one sentence each, and nothing of them is run."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_medusa import COUNTS, OFFICIAL
from tiny_eagles import eagle
from tiny_heads import E, V, assert_same, medusa, random_head, round_trip, write_files

from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats.checkpoint import HeadCheckpoint
from foretoken.formats.registry import known_formats, read_head, write_head
from foretoken.heads.medusa import MedusaConfig
from foretoken.heads.mlp_speculator import MlpSpeculatorConfig

HEAD = medusa()


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "model.safetensors"])
@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.99])
def test_truncated(tmp_path: Path, file: str, kept: float) -> None:
    write_files(tmp_path, OFFICIAL, COUNTS, file=file)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(ModelError, match=f"{file} is damaged"):
        read_head(tmp_path)


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin"])
def test_garbage(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b"\x93garbage" * 50)
    with pytest.raises(ModelError, match=f"{file} is damaged"):
        read_head(tmp_path)


class Payload:
    """What runs when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("is_zip", [True, False])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, is_zip: bool) -> None:
    marker, file = tmp_path / "marker", tmp_path / "medusa_lm_head.pt"
    value = {"0.0.linear.weight": torch.ones(2, 2), "x": Payload(marker)}
    if is_zip:
        torch.save(value, file)
    else:
        file.write_bytes(pickle.dumps(value["x"]))
    with pytest.raises(ModelError, match="is damaged, or a pickle of more than tensors, which could run code"):
        read_head(tmp_path)
    assert not marker.exists()
    pickle.loads(pickle.dumps(value["x"]))
    assert marker.exists()  # it would have


def test_pickles_of_other_things(tmp_path: Path) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    for value, message in (
        ([torch.ones(1)], "holds a list"),
        ({"0.0.linear.weight": torch.ones(2), "step": 3}, "no plain tensors: step"),
        ({"0.0.linear.weight": torch.ones(1).expand(10**9, 8)}, "no plain tensors: 0.0.linear.weight"),
        ({"0.0.linear.weight": torch.eye(3).to_sparse()}, "no plain tensors: 0.0.linear.weight"),
    ):
        torch.save(value, file)
        with pytest.raises(ModelError, match=message):
            read_head(tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(tmp_path: Path, bad: float) -> None:
    tensors = write_files(tmp_path / "head", OFFICIAL, COUNTS)
    tensors["1.1.linear.weight"][3, 4] = bad
    tensors["0.2.weight"][0, 0] = bad
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    with pytest.raises(ModelError, match=r"not finite: 0.2.weight, 1.1.linear.weight"):
        read_head(tmp_path / "head")
    ours = random_head(HEAD)
    ours.weights["bias"][0, 0, 0] = bad
    write_head("native", ours, tmp_path / "native")
    with pytest.raises(ModelError, match="not finite: bias"):
        read_head(tmp_path / "native")


def test_shards(tmp_path: Path) -> None:
    """Two files by an index, which may not name others, and no tensor twice."""
    tensors = write_files(tmp_path, OFFICIAL, COUNTS)
    whole = read_head(tmp_path)[1]
    (tmp_path / "model.safetensors").unlink()
    keys = list(tensors)
    names = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(keys)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    for name in set(names.values()):
        save_file({key: tensors[key] for key in keys if names[key] == name}, tmp_path / name)
    assert_same(whole, read_head(tmp_path)[1])
    index.write_text(json.dumps({"weight_map": names | {"x": "../secret.safetensors"}}))
    with pytest.raises(ModelError, match=r"names files outside its directory: \.\./secret"):
        read_head(tmp_path)
    index.write_text(json.dumps({"weight_map": names | {"x": "third.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks weight files that its index names: third"):
        read_head(tmp_path)
    index.unlink()
    assert_same(whole, read_head(tmp_path)[1])
    save_file({keys[0]: tensors[keys[0]]}, tmp_path / "again.safetensors")
    with pytest.raises(ModelError, match=r"is both in .*again\.safetensors and in"):
        read_head(tmp_path)


def test_config_json(tmp_path: Path) -> None:
    write_files(tmp_path, OFFICIAL)
    assert read_head(tmp_path)[1].config.num_heads == 2  # none is needed
    for text, message in (("{", "is not valid JSON"), ("[1]", "a JSON list"), ("[" * 10**5, "is not valid JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message):
            read_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"foretoken": {"acceptance": "high"}}))
    with pytest.raises(ModelError, match=r"'foretoken' in the config.json"):
        read_head(tmp_path)


def test_no_head(tmp_path: Path) -> None:
    model = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,), "lm_head.weight": (V, E)}
    write_files(tmp_path / "model", model, {"model_type": "llama"})
    with pytest.raises(
        ModelError, match=r"holds no draft head of a known format. Expected one of eagle, eagle3, falcon, gorgon, hydra"
    ):
        read_head(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="holds no weights"):
        read_head(tmp_path / "empty")
    with pytest.raises(ModelError, match="there is no head"):
        read_head(tmp_path / "none")
    for name in ("a.pt", "b.pt"):
        write_files(tmp_path / "two", OFFICIAL, file=name)
    with pytest.raises(ModelError, match=r"several files of weights: a.pt, b.pt"):
        read_head(tmp_path / "two")
    assert read_head(tmp_path / "two" / "b.pt")[1].config.num_heads == 2


def test_quantized_tensors(tmp_path: Path) -> None:
    tensors = write_files(tmp_path, OFFICIAL, COUNTS)
    tensors["0.0.linear.weight"] = tensors["0.0.linear.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"holds quantized tensors: 0.0.linear.weight"):
        read_head(tmp_path)


@pytest.mark.parametrize("config", [HEAD, MlpSpeculatorConfig(hidden_size=E, vocab_size=V, inner_dim=6)])
def test_our_own_format(tmp_path: Path, config: MedusaConfig) -> None:
    head = random_head(config)
    assert_same(head, round_trip("native", head, tmp_path))


@pytest.mark.parametrize("tokens", [[0, 1, V], [0, -1, 2], [1, 1, 2], [0.0, 1.0, 2.0]])
def test_our_own_format_has_a_map_of_tokens(tmp_path: Path, tokens: list[float]) -> None:
    head = random_head(HEAD.model_copy(update={"draft_vocab_size": 3}))
    write_head("native", replace(head, weights={**head.weights, "token_map": torch.tensor(tokens)}), tmp_path)
    with pytest.raises(ModelError, match=r"token_map of .* is no map. Expected different tokens in 0..12"):
        read_head(tmp_path)


def test_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"in format 'medsua'. Did you mean 'medusa'"):
        write_head("medsua", random_head(HEAD), tmp_path)
    assert {"gorgon", "mtp"} == set(known_formats()) - set(known_formats(writable=True))


def test_dtype(tmp_path: Path) -> None:
    head = random_head(HEAD)
    write_head("medusa", head, tmp_path / "half", dtype=torch.float16)
    back = read_head(tmp_path / "half")[1]
    assert torch.equal(back.weights["weight"], head.weights["weight"].half())
    head.weights["weight"][0, 0, 0, 0] = 1e6
    with pytest.raises(ConfigError, match=r"float16 cannot hold numbers of weight. Expected a wider dtype"):
        write_head("medusa", head, tmp_path / "no", dtype=torch.float16)
    assert not (tmp_path / "no").exists()


def learned(draft_vocab: list[int] | None) -> HeadCheckpoint:
    """A head that learned over some of its tokens alone."""
    return random_head(eagle(), draft_vocab=draft_vocab)


def test_the_tokens_that_a_head_learned_over_stay(tmp_path: Path) -> None:
    """In every format's files, and in modules."""
    write_head("native", learned([2, 5, 12]), tmp_path / "head")
    found = read_head(tmp_path / "head")[1]
    assert found.draft_vocab == [2, 5, 12]
    assert found.module().draft_vocab == [2, 5, 12]
    assert "[2, 5, 12]" in (tmp_path / "head" / "config.json").read_text(), "thousands of tokens would be as many lines"
    assert HeadCheckpoint.of_head(found.module()).draft_vocab == [2, 5, 12]
    write_head("eagle", learned([2, 5, 12]), tmp_path / "converted")
    assert read_head(tmp_path / "converted")[1].draft_vocab == [2, 5, 12]
    write_head("native", learned(None), tmp_path / "whole")
    assert read_head(tmp_path / "whole")[1].draft_vocab is None


@pytest.mark.parametrize("ids", [[], [V], [-1, 3], [3, 3], [5, 4], [2, 1 << 70], ["3"], 7, [True]])
def test_tokens_that_no_head_learned_over_are_refused(tmp_path: Path, ids: object) -> None:
    write_head("native", learned([2, 5]), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"draft_vocab": ids}))
    with pytest.raises(ModelError, match="draft_vocab"):
        read_head(tmp_path)
