"""Texts of GGUF files end at tokens that only their texts tell, with and without drafts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from models.gguf_files import TINYCODE, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from foretoken import LLM, SamplingParams

PROMPT = AutoTokenizer.from_pretrained(TINYCODE).encode("class Queue:\n    def push(self, item):\n")
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32}
DRAFTERS: dict[str, Any] = {
    "plain": None,
    "ngram": "ngram",
    "other vocabulary": {
        "method": "draft_model",
        "model": str(TINYCODE.with_name("tinycode-draft")),
        "vocab_match": "text",
    },
}


def renamed(token: int, text: str) -> Callable[[GGUFWriter], None]:
    """Gives a token another text, and leaves out the merges that make or take it."""

    def change(writer: GGUFWriter) -> None:
        values = writer.kv_data[0]
        tokens, merges = values["tokenizer.ggml.tokens"].value, values["tokenizer.ggml.merges"].value
        old, tokens[token] = tokens[token], text
        merges[:] = [each for each in merges if old not in (*each.split(" "), each.replace(" ", ""))]

    return change


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], int]:
    """A file whose text ends at a token in the middle of the text without this end; the text, and where it ends."""
    folder = tmp_path_factory.mktemp("ends")
    model = AutoModelForCausalLM.from_pretrained(TINYCODE, dtype=torch.float32)
    write(folder / "plain.gguf", model, matrices=Type.Q8_0, tied=True, tokenizer=True)
    llm = LLM(str(folder / "plain.gguf"), max_model_len=256)
    ids = list(llm.generate([PROMPT], SamplingParams(**GREEDY))[0].outputs[0].token_ids)
    at = next(at for at in range(6, len(ids)) if ids[at] not in ids[:at])
    write(
        folder / "ends.gguf", model, matrices=Type.Q8_0, tied=True, tokenizer=True,
        adds=[renamed(ids[at], "<|im_end|>")],
    )  # fmt: skip
    return folder / "ends.gguf", ids, at


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_text_ends_at_a_token_that_is_found_by_its_text(files: tuple[Path, list[int], int], drafter: str) -> None:
    path, ids, at = files
    llm = LLM(str(path), max_model_len=256, speculative_config=DRAFTERS[drafter])
    assert set(llm.target.model.eos_ids) == {0, ids[at]}

    def generated(**more: Any) -> tuple[list[int], str | None]:
        output = llm.generate([PROMPT], SamplingParams(**GREEDY | more))[0].outputs[0]
        return list(output.token_ids), output.finish_reason

    assert generated() == (ids[: at + 1], "stop")
    assert generated(ignore_eos=True) == (ids, "length")
    later, _ = generated(min_tokens=at + 3)
    assert later[:at] == ids[:at]
    assert ids[at] not in later[: at + 3]
    assert len(later) >= at + 3
