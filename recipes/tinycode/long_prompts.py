"""Cut prompts of 2 k to 16 k tokens from held-out files, whose continuation depends on what stands far back.

Whole files follow one another in the order of `recipes.tinycode.corpus`: packages one by one, files in path order.

- `continue`: ends in the middle of a function of the last file.
- `retrieve`: ends with the head of a function that stands whole at the beginning of the prompt.
- `edit`: ends with the head of such a function with one of its arguments renamed.

    python -m recipes.tinycode.long_prompts --run-dir DIR
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from recipes.tinycode.corpus import EOS_TEXT, path_hash
from recipes.tinycode.paths import default_run_dir
from recipes.tinycode.workload_prompts import HELD_OUT, edits_of, functions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "benchmarks" / "prompts" / "long.jsonl"
LENGTHS = (2048, 4096, 8192, 15_872)  # tokens; 512 of the context are left for the continuation
PER_LENGTH = 2  # prompts of each kind and length
FUNCTION_TOKENS = 150, 500  # of a function that is asked for again


def asked_again(text: str, *, is_renamed: bool) -> Iterator[tuple[str, str]]:
    """Yield functions of a file and the head that asks for each again, with an argument renamed or as it is."""
    if is_renamed:
        yield from (tuple(edit.rsplit("\n\n\n", 1)) for edit in edits_of(text))  # type: ignore[misc]
        return
    lines = text.split("\n")
    for node in functions_of(text):
        head, code = lines[node.lineno - 1 : node.body[0].lineno], lines[node.lineno - 1 : node.end_lineno]
        if len(code) > 3 * len(head):
            yield "\n".join(code), "\n".join(head) + "\n"


def cut_in_function(text: str) -> str | None:
    """Return a file up to the middle of its last function of some length, at the end of a line; None without one."""
    lines = text.split("\n")
    for node in reversed(list(functions_of(text))):
        last = node.end_lineno or node.lineno
        if last - node.lineno >= 8:
            return "\n".join(lines[: (node.lineno + last) // 2]) + "\n"
    return None


class Cutter:
    """Cuts prompts of given lengths with the target's tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer

    def num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._tokenizer(text)["input_ids"])

    def filled(self, texts: Sequence[str], length: int) -> str | None:
        """Return the last `length` tokens of some texts, from the beginning of a line on; None if they have fewer."""
        kept: list[int] = []
        for text in reversed(texts):
            kept = self._tokenizer(text + EOS_TEXT)["input_ids"] + kept
            if len(kept) >= length:
                end = self._tokenizer.decode(kept[len(kept) - length :])
                return end[end.find("\n") + 1 :]
        return None

    def continued(self, texts: Sequence[str], at: int, length: int) -> str | None:
        """Return a prompt of the kind `continue` that ends in text `at`; None if there is none."""
        end = cut_in_function(texts[at])
        before = None if end is None else self.filled(texts[:at], length - self.num_tokens(end))
        return None if before is None or end is None else before + end

    def far_back(self, texts: Sequence[str], at: int, length: int, *, is_renamed: bool) -> str | None:
        """Return a prompt of the kind `retrieve` or `edit` that begins with text `at`; None if there is none."""
        for code, head in asked_again(texts[at], is_renamed=is_renamed):
            room = length - self.num_tokens(code + EOS_TEXT) - self.num_tokens(head)
            if FUNCTION_TOKENS[0] <= self.num_tokens(code) <= FUNCTION_TOKENS[1]:
                between = self.filled(texts[at + 1 : at + 200], room)
                return None if between is None else code + EOS_TEXT + between + head
        return None


def main() -> None:
    """Write the file of prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run-dir", type=Path, default=default_run_dir())
    args = parser.parse_args()
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(ROOT / "models" / "tinycode16k")
    with (args.run_dir / "held_out.jsonl").open(encoding="utf-8") as lines:
        texts = [file["text"] for file in map(json.loads, lines) if file["path"] in HELD_OUT]
    cutter = Cutter(tokenizer)
    kinds: dict[str, Callable[[int, int], str | None]] = {
        "continue": lambda at, length: cutter.continued(texts, at, length),
        "retrieve": lambda at, length: cutter.far_back(texts, at, length, is_renamed=False),
        "edit": lambda at, length: cutter.far_back(texts, at, length, is_renamed=True),
    }
    records = []
    for kind, cut in kinds.items():
        places = iter(sorted(range(len(texts)), key=lambda at: path_hash(str(at), kind)))
        for length in LENGTHS:
            prompts = islice(filter(None, (cut(at, length) for at in places)), PER_LENGTH)
            records += [
                {"id": f"{kind}-{length}-{number}", "category": f"{kind} {length}", "prompt": prompt}
                for number, prompt in enumerate(prompts)
            ]
    records.sort(key=lambda record: (LENGTHS.index(int(record["category"].split()[1])), record["id"]))
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    print(f"{len(records)} prompts of {sorted(cutter.num_tokens(r['prompt']) for r in records)} tokens")


if __name__ == "__main__":
    main()
