"""Train the byte-level BPE tokenizer of tinycode and encode the corpus into flat token files.

Pre-tokens: runs of newlines, runs of two or more spaces (an indentation is one token), tabs, words with at most one
leading character (` word`, `.word`, `_word`), up to three digits, punctuation. No special token is added by default:
prompts are encoded raw. `<|endoftext|>` (bos, eos and pad) separates documents, so a training document starts after
one; training windows begin anywhere, so a prompt may begin with or without it.

    python -m recipes.tinycode.tokenizer --run-dir DIR
    python -m recipes.tinycode.tokenizer --tokenizer models/tinycode --processes 16   # encode with one there is already
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
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
MAX_LENGTH = 16_384


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


def encode_part(tokenizer_file: Path, path: Path, start: int, stop: int) -> np.ndarray:
    """Encode the documents whose line in `path` begins in bytes [start, stop): uint16, each behind an `EOS`."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    eos = tokenizer.token_to_id(EOS)
    parts = [np.zeros(0, dtype=np.uint16)]
    with path.open("rb") as file:
        if start:
            file.seek(start - 1)
            file.readline()
        while file.tell() < stop:
            ids = tokenizer.encode_batch_fast([json.loads(file.readline())["text"]])[0].ids
            parts.append(np.array([eos, *ids], dtype=np.uint16))
    return np.concatenate(parts)


def encode(tokenizer_file: Path, path: Path, processes: int = 1) -> np.ndarray:
    """Encode a corpus file into one uint16 stream in which each document follows an `EOS`, and one ends it."""
    bounds = np.linspace(0, path.stat().st_size, 4 * processes + 1).astype(int).tolist()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already
    with ProcessPoolExecutor(processes) as pool:
        count = len(bounds) - 1
        parts = list(pool.map(encode_part, [tokenizer_file] * count, [path] * count, bounds[:-1], bounds[1:]))
    return np.concatenate([*parts, parts[0][:1]])


def main() -> None:
    """Train on a sample of the training files or read a tokenizer, save it, and encode both corpus files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run-dir", type=Path, default=default_run_dir())
    parser.add_argument("--tokenizer", type=Path, help="model directory whose tokenizer encodes, instead of a new one")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    train, file = args.run_dir / "train.jsonl", args.run_dir / "tokenizer" / "tokenizer.json"
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    else:
        every = max(1, train.stat().st_size // SAMPLE_BYTES)  # a sample of all packages
        tokenizer = train_tokenizer(islice(read_texts(train), 0, None, every))
    wrap(tokenizer).save_pretrained(file.parent)
    if args.tokenizer:
        shutil.copyfile(args.tokenizer / "tokenizer.json", file)  # the same to the byte
    for name in ("train", "held_out"):
        stream = encode(file, args.run_dir / f"{name}.jsonl", args.processes)
        np.save(args.run_dir / f"{name}.npy", stream)
        print(f"{name}: {len(stream)} tokens")


if __name__ == "__main__":
    main()
