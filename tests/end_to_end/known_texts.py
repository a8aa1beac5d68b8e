"""What a model with recurrent layers writes, by transformers one token at a time, and a drafter that knows it."""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from end_to_end.poison import poison_caches
from limits import threads
from tiny_models import tiny_model

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import Committed, DraftContext, DraftRequest, TargetHandle, TargetReads
from foretoken.trees.merge import Trie

DEPTH = 5  # of drafts
# Least distance of the two best logits, which are about 3; one pass and another differ by about 1e-5.
_LEAST_MARGIN = 1e-4


@cache
def module(architecture: str) -> Any:
    """The target. The oracle has a copy, which no engine ever adapted."""
    return tiny_model(architecture)


class Oracle:
    """Greedy texts by transformers, which reads one token at a time. What it once read it does not read again."""

    def __init__(self, model: Any) -> None:
        """Reads with a model of transformers, which nobody may change afterwards."""
        self._model = model
        self._read: dict[tuple[int, ...], tuple[Any, torch.Tensor]] = {(): (None, torch.empty(0))}

    def text(
        self,
        prompt: Sequence[int],
        count: int,
        allowed: Callable[[list[int]], list[int] | None] = lambda output: None,
    ) -> list[int]:
        """Returns what is written behind a prompt.

        Args:
            prompt: At least one token.
            count: Most tokens.
            allowed: Tokens that may follow an output; none end it, None allows all.
        """
        output: list[int] = []
        while len(output) < count and (following := allowed(output)) != []:
            logits = self._logits((*prompt, *output))
            ids = torch.arange(len(logits)) if following is None else torch.tensor(following)
            best = logits[ids].topk(min(2, len(ids)))
            assert len(ids) == 1 or best.values[0] - best.values[1] > _LEAST_MARGIN, "a near-tie: take another prompt"
            output.append(int(ids[best.indices[0]]))
        return output

    def _logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """(V,) behind some tokens."""
        known = next(end for end in range(len(tokens), -1, -1) if tokens[:end] in self._read)
        for place in range(known, len(tokens)):
            state = copy.deepcopy(self._read[tokens[:place]][0])
            at = torch.tensor([[place]])  # Bamba would take 0 for the position of each forward
            with torch.inference_mode(), threads(1):  # threads take longer than the sums of such small models
                step = self._model(
                    torch.tensor([[tokens[place]]]), position_ids=at, past_key_values=state, use_cache=True
                )
            self._read[tokens[: place + 1]] = step.past_key_values, step.logits[0, -1]
        return self._read[tokens][1]


@cache
def oracle(architecture: str) -> Oracle:
    """That of the target."""
    return Oracle(copy.deepcopy(module(architecture)))


@cache
def _text(architecture: str, prompt: tuple[int, ...], count: int) -> list[int]:
    return oracle(architecture).text(prompt, count)


def text(architecture: str, prompt: Sequence[int], count: int) -> list[int]:
    """Returns `count` greedy tokens after a prompt."""
    return _text(architecture, tuple(prompt), count)


def params(count: int, **more: Any) -> SamplingParams:
    """Greedy decoding of so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **more)


def known(architecture: str, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Returns prompts with their texts."""
    return [[*prompt, *text(architecture, prompt, count)] for prompt in prompts]


def check(architecture: str, outputs: Sequence[RequestOutput], count: int) -> None:
    """Every completion is the known text."""
    for index, output in enumerate(outputs):
        want = text(architecture, output.prompt_token_ids, count)
        for each in output.outputs:
            assert each.error is None, each.error
            assert list(each.token_ids) == want, f"request {index}: another text than the target's"


class Scripted:
    """Drafts a known text as a script says, pass by pass: so many right tokens and wrong ones below, or nothing (-1).

    In trees a wrong sibling comes before every token, so that accepted rows and states are never in place.
    """

    name, reads = "scripted", TargetReads()
    nodes_by_depth = range(1, 2 * DEPTH + 2, 2)

    def __init__(self, texts: list[list[int]], script: Sequence[int], *, is_tree: bool) -> None:
        """Drafts from `texts`, which may grow. Sequence b of a batch is b passes ahead in the script."""
        self._texts, self._script, self._is_tree = texts, script, is_tree
        self._passes: dict[int, int] = {}

    def attach(self, target: TargetHandle) -> None:
        self._vocab_size = target.vocab_size

    def begin(self, slot: int, request: DraftRequest) -> None:
        self._passes[slot] = slot

    def propose(self, context: DraftContext) -> TokenTree:
        asked = zip(context.slots, context.tokens, context.max_depth, strict=True)
        return TokenTree.from_rows([self._trie(*each).row() for each in asked])

    def commit(self, committed: Committed) -> None:
        if committed.verified is not None:
            for slot in committed.slots:
                self._passes[slot] += 1

    def release(self, slot: int) -> None: ...

    def _trie(self, slot: int, tokens: Sequence[int], depth: int) -> Trie:
        num_right = self._script[self._passes[slot] % len(self._script)]
        trie, node, length = Trie(tokens[-1]), 0, len(tokens)
        known = next((each for each in self._texts if each[:length] == list(tokens)), [])
        if num_right < 0:
            return trie
        for place, token in enumerate(known[length : length + min(depth, DEPTH)]):
            if self._is_tree:
                trie.add(node, (token + 1) % self._vocab_size)
            node = trie.add(node, token if place < num_right else (token + 2) % self._vocab_size)
        return trie


def engine(
    architecture: str,
    runner: str,
    shape: str,
    texts: list[list[int]],
    *,
    script: Sequence[int] = (3, -1, 0, 5, 1, -1, -1, 2),
    target: Any = None,
    **more: Any,
) -> LLM:
    """An engine whose dead rows and states are NaN. It drafts `texts`, in chains or trees, or decodes plainly.

    Args:
        architecture: Of the target.
        runner: Of the target.
        shape: "chain", "tree" or "none".
        texts: Prompts with their outputs; the list may grow.
        script: See `Scripted`.
        target: Another model in memory than `module(architecture)`.
        more: Other arguments of `LLM`.
    """
    arguments: dict[str, Any] = {"max_num_seqs": 3, **more}
    if shape != "none":
        arguments |= {"drafter": lambda: Scripted(texts, script, is_tree=shape == "tree"), "trust_drafter": True}
    llm = LLM(module(architecture) if target is None else target, runner=runner, **arguments)
    assert llm.target.name == runner
    poison_caches(llm)
    return llm
