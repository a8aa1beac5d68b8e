"""Runs REST's retriever beside ours, on one corpus: what is found after the end of a text, and the tree of it.

Its retriever is compiled for Python 3.9, so it runs in an environment of that Python and answers in JSON. What makes a
draft of its answers is borrowed from the clone.
"""

from __future__ import annotations

import json
import random
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.interop.borrowed import UnusableError, borrow
from benchmarks.interop.outcome import Outcome, compared
from benchmarks.interop.samples import drafting_handle, greedy_context
from foretoken.drafters.datastore import write_datastore
from foretoken.drafters.rest import Options, RestDrafter

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from benchmarks.interop.samples import Target

    Path_ = tuple[int, ...]

REST = "FasterDecoding/REST"
_TOKENS, _SPANS, _DEPTH, _NODES = 60, range(16, 1, -1), 10, 64
_SEARCH = """
import json, sys
import draftretriever
asked = json.load(sys.stdin)
writer = draftretriever.Writer(index_file_path=asked["index"], max_chunk_len=1 << 20, vocab_size=asked["vocab_size"])
writer.add_entry(asked["corpus"])
writer.finalize()
reader = draftretriever.Reader(index_file_path=asked["index"])
json.dump([[reader.search(text[-span:], choices=asked["choices"]) for span in asked["spans"]]
           for text in asked["texts"]], sys.stdout)
"""


def outcomes(root: Path, target: Target, work: Path) -> Iterator[Outcome]:  # noqa: ARG001 - there is no model
    """Trees of texts with few continuations, which both draft whole, and of those with many, which both cut."""
    (utils,) = borrow(root, "rest.model.utils", stand_ins={"draftretriever": {}})
    corpus, texts = _corpus(), list[list[int]]()
    dice = random.Random(3)
    for _ in range(300):
        begin = dice.randrange(len(corpus) - 40)
        texts.append([*dice.choices(range(_TOKENS), k=8), *corpus[begin : begin + dice.randint(2, 20)]])
    answers = _searched(root, corpus, texts, work)
    theirs = [_their_paths(utils, text, found) for text, found in zip(texts, answers, strict=True)]
    ours = _our_paths(corpus, texts, work / "ours", _NODES)
    whole = [place for place, paths in enumerate(ours) if sum(len(set(path)) for path in paths) <= _NODES]
    yield compared(
        REST, f"{len(whole)} texts whose continuations fit", claimed=True, ours=[_table(ours, whole)],
        theirs=lambda: [_table(theirs, whole)],
    )  # fmt: skip
    cut = [place for place in range(len(texts)) if place not in whole]
    all_paths = _our_paths(corpus, texts, work / "all", 511)
    least = {place: min(ours[place].values()) for place in cut}
    rarer = [sum(all_paths[place].get(path, -1.0) < least[place] for path in theirs[place]) for place in cut]
    sizes = [sum(len(paths[place]) for place in cut) / len(cut) for paths in (theirs, ours)]
    case = f"{len(cut)} texts with more: none of its {sizes[0]:.0f} nodes is rarer than our {sizes[1]:.0f}"
    yield compared(
        REST, case, claimed=True,
        ours=[torch.zeros(len(cut))], theirs=lambda: [torch.tensor(rarer)],
    )  # fmt: skip


def _corpus() -> list[int]:
    """Text in which some runs of tokens come again and again."""
    dice, corpus = random.Random(2), list[int]()
    phrases = [dice.choices(range(_TOKENS), k=dice.randint(3, 12)) for _ in range(120)]
    while len(corpus) < 4000:
        corpus += dice.choice(phrases[: dice.randint(1, 120)])
    return corpus


def _searched(root: Path, corpus: list[int], texts: list[list[int]], work: Path) -> Any:
    """For each text, what the original finds after its last 16, 15 … 2 tokens."""
    python = root / ".venv" / "bin" / "python"
    asked = {"index": str(work / "rest.idx"), "vocab_size": _TOKENS, "corpus": corpus, "texts": texts,
             "spans": [*_SPANS], "choices": _NODES}  # fmt: skip
    try:
        done = subprocess.run(
            [python, "-c", _SEARCH], input=json.dumps(asked), capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as err:
        said = str(getattr(err, "stderr", None) or err).splitlines()[-1]
        raise UnusableError(f"'{python}' does not run its retriever: {said}") from err
    return json.loads(done.stdout)


def _their_paths(utils: Any, text: list[int], answers: list[Any]) -> set[Path_]:
    """Paths of the draft that the original verifies: each node's ancestors by its mask, in the order of positions."""

    class Store:
        def search(self, tokens: list[int], **_: int) -> Any:
            return answers[_SPANS.index(len(tokens))]

    logits = torch.nn.functional.one_hot(torch.tensor([[text[-1]]]), _TOKENS).float()
    _, tokens, buffers = utils.generate_candidates_and_draft_buffer(
        logits, torch.tensor([text[:-1]]), Store(), [*_SPANS], max_num_draft=_NODES, device="cpu"
    )
    sees, depths = buffers["draft_attn_mask"][0, 0].bool(), buffers["draft_position_ids"]
    paths = [sorted(row.nonzero()[:, 0].tolist(), key=lambda node: int(depths[node])) for row in sees]
    return {tuple(tokens[0, path[1:]].tolist()) for path in paths[1:]}


def _our_paths(corpus: list[int], texts: list[list[int]], place: Path, num_nodes: int) -> list[dict[Path_, float]]:
    """Paths of our drafts of so many nodes, with the share of continuations that begin with each."""
    write_datastore(
        place, np.array(corpus, dtype=np.uint16), vocab_size=_TOKENS, eos_id=None, tokenizer_sha="", tokens_sha256=""
    )
    options = Options(
        method="rest", datastore=str(place), rest_max_match=_SPANS[0], rest_min_match=_SPANS[-1], rest_max_matches=5000,
        num_speculative_tokens=_DEPTH, max_nodes=num_nodes + 1, tree="tree",
    )  # fmt: skip
    drafter = RestDrafter(options)
    drafter.attach(drafting_handle(None, vocab_size=_TOKENS))
    drafted = []
    for text in texts:
        tree = drafter.propose(greedy_context(text, vocab_size=_TOKENS))
        assert tree.scores is not None, "the drafter scores its trees"
        paths: list[Path_] = [()]
        for token, parent in zip(tree.tokens[0, 1:].tolist(), tree.parents[0, 1:].tolist(), strict=True):
            paths.append((*paths[parent], token))
        drafted.append(dict(zip(paths[1:], tree.scores[0, 1:].exp().tolist(), strict=True)))
    return drafted


def _table(paths: Sequence[Collection[Path_]], places: list[int]) -> Tensor:
    """(R, 1024) paths of some texts in ascending order, each behind -1."""
    table = torch.full((len(places), 1024), -2)
    for row, place in zip(table, places, strict=True):
        flat = [token for path in sorted(paths[place]) for token in (-1, *path)]
        row[: len(flat)] = torch.tensor(flat)
    return table
