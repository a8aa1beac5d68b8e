"""The tokens that a head learned over, in every format's files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretoken.core.errors import ModelError
from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint
from foretoken.formats.registry import read_head, write_head
from foretoken.heads.base import build_head
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.eagle import EagleConfig

LAYER = LayerConfig(num_attention_heads=2, num_key_value_heads=1, head_dim=4, intermediate_size=12)


def head(draft_vocab: list[int] | None) -> HeadCheckpoint:
    torch.manual_seed(0)
    module = build_head(EagleConfig(hidden_size=8, vocab_size=30, layer=LAYER), dtype=torch.float32)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return replace(HeadCheckpoint.of_head(module), draft_vocab=draft_vocab)


def test_native_files_and_modules_keep_it(tmp_path: Path) -> None:
    native.write_checkpoint(head([2, 5, 29]), tmp_path / "head")
    found = read_head(tmp_path / "head")[1]
    assert found.draft_vocab == [2, 5, 29]
    assert found.module().draft_vocab == [2, 5, 29]
    assert "[2, 5, 29]" in (tmp_path / "head" / "config.json").read_text(), "thousands of tokens would be as many lines"
    assert HeadCheckpoint.of_head(found.module()).draft_vocab == [2, 5, 29]
    native.write_checkpoint(head(None), tmp_path / "whole")
    assert read_head(tmp_path / "whole")[1].draft_vocab is None


@pytest.mark.parametrize("form", ["eagle", "native"])
def test_conversions_keep_it(tmp_path: Path, form: str) -> None:
    write_head(form, head([2, 5, 29]), tmp_path / "head")
    assert read_head(tmp_path / "head")[1].draft_vocab == [2, 5, 29]


@pytest.mark.parametrize("ids", [[], [30], [-1, 3], [3, 3], [5, 4], [2, 1 << 70], ["3"], 7, [True]])
def test_other_lists_are_refused(tmp_path: Path, ids: object) -> None:
    native.write_checkpoint(head([2, 5]), tmp_path / "head")
    config = tmp_path / "head" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"draft_vocab": ids}))
    with pytest.raises(ModelError, match="draft_vocab"):
        read_head(tmp_path / "head")
