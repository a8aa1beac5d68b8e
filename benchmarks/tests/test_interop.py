"""The interop command without any clone, with unusable ones, and with one made here that computes the same or not."""

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.interop.__main__ import PROGRAMS, main
from benchmarks.interop.borrowed import UnusableError, borrow
from benchmarks.interop.outcome import Outcome, compared

pytestmark = pytest.mark.slow

# A stand-in for fms-extras' file: the published recurrence, with a factor that may be wrong.
SPECULATOR = """
import torch
from torch import nn
from fms import models
from fms.modules.layernorm import LayerNormParameterized as Norm

models.register_model("ignored")


class MLPSpeculator(nn.Module):
    def __init__(self, emb_dim, inner_dim, vocab_size, n_predict, tie_weights, scale_input):
        super().__init__()
        assert not tie_weights or n_predict > 1
        self.scale, self.factor = scale_input, FACTOR * ((1 - 0.5 ** (1 / n_predict)) * inner_dim / 2) ** 0.5
        self.factor /= 0.5 ** (0.5 / n_predict)
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner_dim) for _ in range(n_predict))
        inputs = [emb_dim] + [inner_dim] * (n_predict - 1)
        self.proj = nn.ModuleList(nn.Linear(size, inner_dim, bias=False) for size in inputs)
        self.head = nn.ModuleList(nn.Linear(inner_dim, vocab_size, bias=False) for _ in range(n_predict))
        self.ln = nn.ModuleList(Norm(inner_dim, elementwise_shift=True) for _ in range(n_predict))

    def forward(self, state, inds):
        out = []
        if self.scale:
            state = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + 1e-6) / 2**0.5
        for i, (emb, proj, head, ln) in enumerate(zip(self.emb, self.proj, self.head, self.ln)):
            state = nn.functional.gelu(ln(proj(state) + self.factor * emb(inds[:, i : i + state.size(1)])))
            out.append(head(state))
        return torch.stack(out)
"""


def clone(directory: Path, factor: float) -> Path:
    """Somebody's repository."""
    file = directory / "fms_extras" / "models" / "speculator.py"
    file.parent.mkdir(parents=True)
    file.write_text(SPECULATOR.replace("FACTOR", str(factor)))
    return directory


def test_without_clones_everything_is_skipped_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    for option in PROGRAMS:
        assert f"no --{option}-repo" in said
    assert len(PROGRAMS) == 9
    assert "0 comparisons ran, 9 were skipped, 0 contradict" in said


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.5, 1)])
def test_a_clone_that_computes_the_same_or_not(
    tmp_path: Path, factor: float, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(sys.modules)
    out = tmp_path / "out.json"
    assert main(["--fms-extras-repo", str(clone(tmp_path / "clone", factor)), "--json", str(out)]) == code
    rows = [row for row in json.loads(out.read_text()) if row["program"] == "fms-extras"]
    assert len(rows) == 6
    assert {row["found"] for row in rows} == {"same" if code == 0 else "another network"}
    assert all(row["is_as_stated"] == (code == 0) for row in rows)
    assert ("CONTRADICTS" in capsys.readouterr().out) == (code == 1)
    assert not {name for name in set(sys.modules) - before if name.split(".")[0] in ("fms", "fms_extras")}


def test_clones_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken" / "fms_extras" / "models"
    broken.mkdir(parents=True)
    (broken / "speculator.py").write_text("import of_what_nobody_has")
    options = ["--medusa-repo", str(tmp_path / "empty"), "--fms-extras-repo", str(tmp_path / "broken")]
    assert main(options) == 0
    said = capsys.readouterr().out
    assert "has no medusa/model/medusa_model.py" in said
    assert "fms_extras.models.speculator does not run here: ModuleNotFoundError" in said


def test_stand_ins_are_gone_afterwards(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "module.py").write_text("from json.nothing import value\nfrom .other import number")
    stand_ins = {"json.nothing": {"value": 5}, "theirs.other": {"number": 6}}
    (module,) = borrow(tmp_path, "theirs.module", stand_ins=stand_ins)
    assert (module.value, module.number) == (5, 6)
    assert sys.modules["json"] is json
    assert not {"theirs", "theirs.module", "theirs.other", "json.nothing"} & set(sys.modules)
    with pytest.raises(UnusableError):
        borrow(tmp_path, "theirs.module")


def test_what_counts_as_a_contradiction() -> None:
    ours = [torch.ones(2, 3)]

    def stops() -> list[torch.Tensor]:
        raise ValueError("no\nmore")

    def outcome(claimed: bool | None, factor: float | None) -> Outcome:
        theirs = stops if factor is None else lambda: [part * factor for part in ours]
        return compared("program", "case", claimed=claimed, ours=ours, theirs=theirs)

    found = {(claimed, factor): outcome(claimed, factor) for claimed in (True, False, None) for factor in (1, 2, None)}
    assert [found[True, factor].found for factor in (1, 2, None)] == ["same", "another network", "stops"]
    assert found[True, None].note == "ValueError: no"
    assert {key for key, one in found.items() if not one.is_as_stated} == {(True, 2), (True, None), (False, 1)}
