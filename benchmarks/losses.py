"""Constructs six slow drafters and lets `foretoken.bench.loss` find the cause of each, by the real clock.

    python -m benchmarks.losses [MODEL] [--head models/tinycode-eagle3] [--num-prompts 8] [--max-tokens 96]

This module is a drafter as well: an oracle that computes for a while in `propose` and in `commit`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from foretoken import LLM
from foretoken.bench.compare import compare_setups
from foretoken.bench.loss import split_loss
from foretoken.bench.workload import Workload, load_prompts
from foretoken.drafters import oracle
from foretoken.entrypoints.config import Setup
from foretoken.entrypoints.model_arguments import load_target
from foretoken.formats import native
from foretoken.formats.registry import read_head

if TYPE_CHECKING:
    from foretoken.core.token_tree import TokenTree
    from foretoken.drafters.base import Committed, DraftContext


class Options(oracle.Options):
    """Options of the oracle, and milliseconds that it computes for at each draft and at each commit."""

    draft_ms: float = 0.0
    commit_ms: float = 0.0


class SlowOracle(oracle.OracleDrafter):
    """The oracle, with extra work."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._draft_ms, self._commit_ms = options.draft_ms, options.commit_ms

    def propose(self, context: DraftContext) -> TokenTree:
        """Computes for a while, then proposes."""
        _compute(self._draft_ms)
        return super().propose(context)

    def commit(self, committed: Committed) -> None:
        """Computes for a while after each verified draft."""
        super().commit(committed)
        if committed.verified is not None:
            _compute(self._commit_ms)


def create(options: Options) -> SlowOracle:
    """See `foretoken.drafters.registry`."""
    return SlowOracle(options)


def _compute(milliseconds: float) -> None:
    end, square = time.perf_counter() + milliseconds / 1e3, torch.eye(32)
    while time.perf_counter() < end:
        square = square @ square


def cases(target: str, shuffled_head: str, references: list[list[int]]) -> dict[str, tuple[Any, ...]]:
    """Returns by name of the setup: its `speculative_config`, and the causes that it constructs, the largest first."""
    slow = {"method": "benchmarks.losses", "references": references, "tree": "chain"}
    return {
        "head of shuffled weights": (
            {"method": "eagle3", "model": shuffled_head, "tree": "chain", "num_speculative_tokens": 4}, "acceptance",
        ),
        "target as its draft model": (
            {"method": "draft_model", "model": target, "tree": "chain", "num_speculative_tokens": 4}, "drafting",
        ),
        "wide tree, all right": ({**slow, "tree": "tree", "pattern": [8], "num_speculative_tokens": 8}, "wide passes"),
        "work at each commit": ({**slow, "pattern": [4], "num_speculative_tokens": 4, "commit_ms": 12.0}, "host"),
        "long chain, one right": (
            {**slow, "pattern": [1], "num_speculative_tokens": 8}, "acceptance", "wide passes",
        ),
        "work at each draft and commit": (
            {**slow, "pattern": [4], "num_speculative_tokens": 4, "draft_ms": 24.0, "commit_ms": 12.0},
            "drafting", "host",
        ),
    }  # fmt: skip


def write_shuffled(head: str, directory: Path) -> None:
    """Writes a head with the numbers of every matrix in another order."""
    (_, checkpoint), generator = read_head(Path(head)), torch.Generator().manual_seed(0)
    weights = {
        key: value.flatten()[torch.randperm(value.numel(), generator=generator)].view(value.shape)
        for key, value in checkpoint.weights.items()
    }
    native.write_checkpoint(replace(checkpoint, weights=weights), directory)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="models/tinycode")
    parser.add_argument("--head", default="models/tinycode-eagle3")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    given = parser.parse_args()
    target, tokenizer = load_target(given.model, dtype="auto", device="auto")
    workload = Workload(prompts=load_prompts(limit=given.num_prompts), temperatures=(0.0,), max_tokens=given.max_tokens)
    plain_texts = LLM(target, tokenizer=tokenizer).generate(list(workload.prompts), workload.params(0.0))
    references = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in plain_texts]
    print(
        "| case | lost, ms a token | of it without a cause | causes, ms a token | constructed |\n|---|---|---|---|---|"
    )
    with TemporaryDirectory() as directory:
        write_shuffled(given.head, Path(directory) / "head")
        made = cases(given.model, f"{directory}/head", references)
        setups = [Setup(name, config) for name, (config, *_) in made.items()]
        [[plain, *rows]] = compare_setups(target, tokenizer, setups, workload)
    for row in rows:
        loss, constructed = split_loss(row, plain), made[row.setup][1:]
        found = [cause.name for cause in loss.causes][: len(constructed)] == list(constructed)
        causes = ", ".join(f"{cause.name} {cause.seconds * 1e3:.2f}" for cause in loss.causes)
        print(
            f"| {row.setup} | {loss.seconds * 1e3:.2f} | {loss.unexplained / loss.seconds:+.1%} | {causes} | "
            f"{', '.join(constructed)}: {'found' if found else 'missed'} |"
        )


if __name__ == "__main__":
    main()
