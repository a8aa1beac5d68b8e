"""Train the byte-level BPE tokenizer of tinycode and encode the corpus into flat token files.

Pre-tokens: runs of newlines, runs of two or more spaces (an indentation is one token), tabs, words with at most one
leading character (` word`, `.word`, `_word`), up to three digits, punctuation. No special token is added by default:
prompts are encoded raw. `<|endoftext|>` (bos, eos and pad) separates documents, so a training document starts after
one; training windows begin anywhere, so a prompt may begin with or without it.

    python -m recipes.tinycode.tokenizer --run-dir DIR
    python -m recipes.tinycode.tokenizer --tokenizer models/tinycode    # encode with a tokenizer there is already
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from recipes.tinycode.paths import default_run_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB_SIZE = 6144
EOS = "<|endoftext|>"
SPECIAL_TOKENS = [EOS, *(f"<|reserved_{i}|>" for i in range(7))]
PATTERN = r"[\r\n]+| {2,}|\t+|[^\r\n\t\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
SAMPLE_BYTES = 40_000_000
MAX_LENGTH = 1024


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer of exactly `VOCAB_SIZE` entries; any text round-trips exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"vocabulary has {tokenizer.get_vocab_size()} entries, expected {VOCAB_SIZE}: use more text")
    return tokenizer


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Wrap for `AutoTokenizer`; adds no special token on encoding and cleans nothing up on decoding."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def read_texts(path: Path) -> Iterator[str]:
    """Yield the documents of a corpus file in its order."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def limited(texts: Iterator[str], limit: int) -> Iterator[str]:
    """Yield texts until `limit` characters have gone by."""
    for text in texts:
        yield text
        limit -= len(text)
        if limit <= 0:
            return


def encode(tokenizer: Tokenizer, texts: Iterator[str]) -> np.ndarray:
    """Encode documents into one uint16 stream in which each document follows an `<|endoftext|>`."""
    eos = tokenizer.token_to_id(EOS)
    parts: list[np.ndarray] = []
    batch: list[str] = []

    def flush() -> None:
        parts.extend(np.array([eos, *e.ids], dtype=np.uint16) for e in tokenizer.encode_batch(batch))
        batch.clear()

    for text in texts:
        batch.append(text)
        if len(batch) == 256:
            flush()
    flush()
    return np.concatenate([*parts, np.array([eos], dtype=np.uint16)])


def main() -> None:
    """Train on a sample of the training files or read a tokenizer, save it, and encode both corpus files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run-dir", type=Path, default=default_run_dir())
    parser.add_argument("--tokenizer", type=Path, help="model directory whose tokenizer encodes, instead of a new one")
    args = parser.parse_args()
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(limited(read_texts(args.run_dir / "train.jsonl"), SAMPLE_BYTES))
    wrap(tokenizer).save_pretrained(args.run_dir / "tokenizer")
    for name in ("train", "held_out"):
        stream = encode(tokenizer, read_texts(args.run_dir / f"{name}.jsonl"))
        np.save(args.run_dir / f"{name}.npy", stream)
        print(f"{name}: {len(stream)} tokens")


if __name__ == "__main__":
    main()
