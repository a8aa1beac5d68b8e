"""Runs the drafting of lookahead decoding and token recycling beside ours, on what decides the drafts.

LADE's whole greedy search and Token Recycling's whole decoding run around a stand-in for the target whose answers
depend on tokens alone, so that attention masks are not compared, but every window, guess and tree is.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from benchmarks.interop.borrowed import borrow
from benchmarks.interop.outcome import Outcome, compared
from foretoken.drafters.lookahead import NgramPool, Window, answers_by_path
from foretoken.drafters.recycling import SuccessorMatrix
from foretoken.trees.choices import TreeShape
from foretoken.trees.merge import Trie

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor

    from benchmarks.interop.samples import Target


LADE, RECYCLING = "hao-ai-lab/LookaheadDecoding", "Luowaterbi/TokenRecycling"
_TOKENS = 40


def lookahead(root: Path, target: Target, work: Path) -> Iterator[Outcome]:  # noqa: ARG001 - there is no model
    """LADE's windows and guesses at every step, with pools that fill and that overflow."""
    names = ("LogitsProcessorList", "StoppingCriteriaList", "GreedySearchOutput", "SampleOutput",
             "TemperatureLogitsWarper", "TopPLogitsWarper", "TopKLogitsWarper")  # fmt: skip
    stand_ins: dict[str, dict[str, Any]] = {
        "transformers": {"GenerationMixin": object},
        "transformers.generation.utils": dict.fromkeys(names, list),
    }
    (module,) = borrow(root, "lade.decoding", stand_ins=stand_ins)
    for width, ngram, guesses in ((7, 5, 7), (4, 3, 2), (3, 6, 1)):
        chosen = {"WINDOW_SIZE": width, "LEVEL": ngram, "GUESS_SET_SIZE": guesses}
        with mock.patch.dict(module.CONFIG_MAP, chosen):
            steps = _lade_steps(module)
        yield compared(
            LADE, f"windows of {width}, {ngram}-grams, {guesses} guesses", claimed=True,
            ours=_our_windows(steps, width, ngram, guesses),
            theirs=partial(_tables, [step.window for step in steps], [step.guesses for step in steps]),
        )  # fmt: skip


def recycling(root: Path, target: Target, work: Path) -> Iterator[Outcome]:  # noqa: ARG001 - there is no model
    """Trees of Token Recycling, where ours know a successor: a token that was never seen is 0 in the original."""
    cache = ((), torch.zeros(1, 1 << 12, 1), torch.zeros(1))
    stand_ins: dict[str, dict[str, Any]] = {
        "fastchat.utils": {"str_to_torch_dtype": None},
        "evaluation.eval": {"run_eval": None, "reorg_answer_file": None},
        "model.recycling.kv_cache": {"initialize_past_key_values": lambda _: cache},
        "model.recycling.modeling_llama_kv": {"LlamaForCausalLM": None},
    }  # fmt: skip
    module, template = borrow(
        root, "evaluation.inference_recycling", "model.recycling.tree_template_", stand_ins=stand_ins
    )
    logits = torch.randn(_TOKENS, _TOKENS, generator=torch.Generator().manual_seed(5))
    theirs = _recycled(module, logits)
    shape, matrix, ours = (
        TreeShape.from_choices(template.choose_tree_template("2.2.2")),
        SuccessorMatrix(_TOKENS, 8),
        [],
    )
    ends = np.searchsorted(np.array(shape.depths), np.arange(shape.depth + 1), side="right").tolist()
    levels = [slice(*pair) for pair in pairwise(ends)]
    for tokens in theirs:
        ours.append(matrix.fill(int(tokens[0]), np.array(shape.parents), np.array(shape.ranks), levels))
        matrix.update(tokens.numpy(), logits[tokens].topk(8).indices.numpy())
    found = torch.from_numpy(np.stack(ours))
    known = torch.where(found < 0, -1, torch.stack(theirs))
    yield compared(
        RECYCLING, f"{len(theirs)} trees of {shape.num_nodes} nodes, {float((found >= 0).float().mean()):.0%} known",
        claimed=True, ours=[found], theirs=lambda: [known],
    )  # fmt: skip


class _Step(NamedTuple):
    """What a pass of LADE was given: the root, the window row by row, its guesses; and the answers it got."""

    root: int
    window: list[int]
    guesses: list[int]
    answers: list[int]


def _lade_steps(module: Any) -> list[_Step]:
    """Every pass of the original greedy search over 60 tokens, answered by one of three tables in turn."""
    generator = torch.Generator().manual_seed(5)
    tables = [torch.randperm(_TOKENS, generator=generator).tolist() for _ in range(3)]
    prompt, steps = [3, 1, 4, 1, 5, 9, 2, 7], list[_Step]()

    def forward(*, input_ids: Tensor, past_tokens: Any, guess_tokens: Any, fill_level: int, **_: Any) -> Any:
        answers = tables[len(steps) % 3]
        rows = [list(row) for row in past_tokens if row is not None]
        steps.append(_Step(int(input_ids[0, -1]), [*chain(*rows)], list(guess_tokens or []), answers))

        def scores(tokens: list[int]) -> Tensor:
            return torch.nn.functional.one_hot(torch.tensor([[answers[token] for token in tokens]]), _TOKENS).float()

        return SimpleNamespace(
            out_logits=scores([steps[-1].root])[0], inp_logits=scores(past_tokens[fill_level]),
            guess_logits=scores(guess_tokens) if guess_tokens else None, past_key_values=[], kvcache_len=0, step_len=0,
        )  # fmt: skip

    class Until(list[Any]):
        def __call__(self, ids: Tensor, _: Any) -> bool:
            return bool(ids.shape[1] >= len(prompt) + 60)

    names = ("output_scores", "output_attentions", "output_hidden_states", "return_dict_in_generate")
    settings = SimpleNamespace(pad_token_id=None, eos_token_id=None, **dict.fromkeys(names, False))
    model = SimpleNamespace(
        generation_config=settings, config=SimpleNamespace(is_encoder_decoder=False), jforward_multilevel=forward,
        prepare_inputs_for_generation=lambda ids, **_: {"input_ids": ids, "position_ids": ids},
        _update_model_kwargs_for_generation=lambda _, kwargs, **__: kwargs,
    )  # fmt: skip
    module.jacobi_greedy_search_multilevel(
        model, torch.tensor([prompt]), logits_processor=[], stopping_criteria=Until(),
        attention_mask=torch.ones(1, len(prompt)),
    )  # fmt: skip
    return steps


def _our_windows(steps: list[_Step], width: int, ngram: int, guesses: int) -> list[Tensor]:
    """Windows and guesses at the same steps, from the original's first window on."""
    window = Window(width, ngram, prompt=[0], unwanted=(), seed=0)
    window.columns = [[0], *([token] for token in steps[0].window)]
    pool, windows, guessed = NgramPool(per_key=guesses, max_ngrams=1 << 14), [], []
    for step in steps:
        rows = zip(*window.columns, strict=True)
        windows.append([*next(rows)[1:], *chain(*rows)])
        drafted = [*pool.after(step.root)][::-1]  # the original lists the most recent last
        guessed.append([*chain(*drafted)])
        trie = Trie(step.root)
        for guess in drafted:
            trie.add_path(guess, 1 << 14)
        window.add_to(trie, max_depth=1 << 14, max_nodes=1 << 14)
        row = trie.row()
        answers = answers_by_path(row, [step.answers[token] for token in row.tokens])
        for found in window.learn_answers(step.root, answers):
            pool.add(*found)
    return _tables(windows, guessed)


def _tables(*rows: list[list[int]]) -> list[Tensor]:
    """Rows of different lengths, padded with -1."""
    return [_padded(each) for each in rows]


def _padded(rows: list[list[int]]) -> Tensor:
    """(R, longest) of rows."""
    longest = max(1, *map(len, rows))
    return torch.tensor([[*row, *[-1] * (longest - len(row))] for row in rows])


def _recycled(module: Any, logits: Tensor) -> list[Tensor]:
    """(80,) tokens of every tree that the original has verified over 40 passes."""
    trees: list[Tensor] = []

    def model(input_ids: Tensor, **_: Any) -> Any:
        trees.append(input_ids[0].clone())
        return SimpleNamespace(logits=logits[input_ids])

    module.adj_matrix = torch.zeros(_TOKENS, 8, dtype=torch.long)
    prompt = SimpleNamespace(input_ids=torch.tensor([[3, 1, 4]]))
    device = torch.device("cpu")
    with (
        mock.patch.object(torch.Tensor, "cuda", lambda self: self),
        mock.patch.object(torch, "device", return_value=device),
    ):
        module.recycling_forward(prompt, model, SimpleNamespace(eos_token_id=_TOKENS), 40)
    return trees[1:]  # the first is the prompt
