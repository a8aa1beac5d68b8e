"""Draft models with recurrent layers: what they draft after any history is what a new drafter drafts after the text."""

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from drafting_contexts import accepted, attached, begin, context
from end_to_end.tiny_llms import MEDUSA_CHOICES, WIDTHS, draft_model, noisy
from pairwise import slow_products
from tiny_models import VOCAB_SIZE, tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree
from foretoken.decoder.native import NativeBlocks
from foretoken.drafters.base import DraftRequest, Prefix
from foretoken.drafters.draft_model import DraftModelDrafter
from tests.tree_checks import check_tree

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 5},
    "choices": {"tree": MEDUSA_CHOICES},
    "widths": {"tree": WIDTHS},
    "dynamic": {"tree": "dynamic", "num_speculative_tokens": 4, "tree_top_k": 3, "max_nodes": 12},
}
ARCHITECTURES = ("qwen3_5", "lfm2", "bamba", "jamba")  # the last one on the generic runner
PARAMS = [SamplingParams(temperature=0.0), *(SamplingParams(temperature=0.9, seed=seed) for seed in (1, 2))]


def drafter(architecture: str, runner: str = "auto", **options: Any) -> DraftModelDrafter:
    """A drafter over a tiny model, with weights as they are stored."""
    module = noisy(architecture, dtype=torch.float32)
    made = attached(draft_model(module, quantization="none", **options)(), runner=runner)
    assert isinstance(made, DraftModelDrafter)
    return made


def assert_equal(ours: TokenTree, theirs: TokenTree, row: int, *, is_exact: bool) -> None:
    """One sequence's tree and the only tree of another proposal."""
    assert ours.rows()[row] == theirs.rows()[0]
    count = int(theirs.num_nodes[0])
    assert ours.scores is not None
    assert theirs.scores is not None
    tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(ours.scores[row, :count], theirs.scores[0, :count], **tolerance)


@pytest.fixture
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """How drafts are made: "whole" in one call where the decoder can, or a pass for each of the "levels"."""
    if request.param == "whole":
        yield request.param
        return
    with mock.patch("foretoken.drafters.levels.draft_trees", return_value=False):
        yield request.param


on_both_ways = pytest.mark.parametrize("way", ["whole", "levels"], indirect=True)


@pytest.mark.parametrize("how", ["some", "everything", "nothing"])
@pytest.mark.parametrize(
    ("shape", "architecture", "way"), slow_products(list(SHAPES), ARCHITECTURES, ["whole", "levels"], each=1),
    indirect=["way"],
)  # fmt: skip
def test_a_draft_is_that_of_a_new_drafter(shape: str, architecture: str, way: str, how: str) -> None:
    """Ragged depths, thrown-away proposals, rounds without one, slots that begin anew, prompts in chunks."""
    made, draw = drafter(architecture, **SHAPES[shape]), random.Random(f"{shape} {how}")
    made._runner.prefill_chunk = 4
    slots, texts = [4, 0, 2], [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 11)]
    for round_ in range(7):
        depth = [draw.choice([1, 2, 8]) for _ in slots] if round_ % 3 else [8, 8, 8]
        if round_ % 4 == 1:
            made.propose(context(texts, max_depth=[3, 0, 8], params=PARAMS, slots=slots))  # never verified
        tree = made.propose(context(texts, max_depth=depth, params=PARAMS, slots=slots))
        check_tree(tree)
        for row, text in enumerate(texts):
            fresh = drafter(architecture, **SHAPES[shape])
            alone = fresh.propose(context([text], max_depth=[max(depth)], params=[PARAMS[row]]))
            if depth[row] >= max(depth):
                assert_equal(tree, alone, row, is_exact=made._runner.name == "lean-native")
        for each, text in zip(tree.rows(), texts, strict=True):
            text.extend(accepted(each, how, draw))
        if round_ == 4:  # iterations without a draft
            texts[0] += [draw.randrange(VOCAB_SIZE) for _ in range(7)]
        if round_ == 5:
            made.release(slots[1])
            begin(made, slots[1])
            texts[1] = texts[1][:3]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@on_both_ways
def test_a_failed_pass_leaves_no_state_that_counts_as_drafted(
    architecture: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass of a draft in turn: the proposal is repeated, and the next one too."""
    made = drafter(architecture, num_speculative_tokens=4)
    text = [5, 6, 7, 8]
    is_native = made._runner.name == "lean-native"
    owner, name = (made._runner.decoder.workspaces, "take") if is_native else (made._runner, "run")
    for failing in range(6):
        call, calls = getattr(owner, name), [0]

        def fail(*arguments: Any, at: int = failing, call: Any = call, calls: list[int] = calls) -> Any:
            calls[0] += 1
            if calls[0] == at:
                raise MemoryError
            return call(*arguments)

        with monkeypatch.context() as patch, suppress(MemoryError):
            patch.setattr(owner, name, fail)
            made.propose(context([text]))
        tree = made.propose(context([text]))
        fresh = drafter(architecture, num_speculative_tokens=4)
        assert_equal(tree, fresh.propose(context([text])), 0, is_exact=made._runner.name == "lean-native")
        text = [*text, *tree.rows()[0].tokens[1 : 1 + failing % 5], 9]


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each pass of native decoders, but for levels that one call drafts with its roots."""
    fed, prepared = list[int](), NativeBlocks.prepared

    def seen(blocks: Any, work: Pass, *inputs: Any) -> Any:
        fed.append(work.num_tokens)
        return prepared(blocks, work, *inputs)

    monkeypatch.setattr(NativeBlocks, "prepared", seen)
    return fed


@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2"])
@on_both_ways
def test_no_token_is_read_twice(architecture: str, way: str, fed: list[int]) -> None:
    """After full acceptance the last drafted token and the bonus token are new; after none the bonus token alone."""
    made = drafter(architecture, num_speculative_tokens=4)
    levels = [1, 1, 1] if way == "levels" else []  # three of the four drafted tokens
    text = [5, 6, 7]
    fed.clear()
    tree = made.propose(context([text]))
    assert fed == [2, 1, *levels]  # the prompt and the root
    text += [*tree.rows()[0].tokens[1:], 9]
    fed.clear()
    made.propose(context([text]))
    assert fed == [2, *levels]
    fed.clear()
    made.propose(context([text]))  # the proposal was discarded
    assert fed == [1, *levels]
    fed.clear()
    made.propose(context([[*text, 11]]))
    assert fed == [1, *levels]


def test_the_prompt_of_another_text_is_not_read_again(fed: list[int]) -> None:
    """Completions of one prompt begin before its last token, where the state is known."""
    made = drafter("qwen3_5", num_speculative_tokens=2)
    prompt = [3 + at % 40 for at in range(20)]
    for more in ([7], [7, 8], [7, 8, 9]):
        made.propose(context([[*prompt, *more]]))
    prefix = Prefix(slot=0, length=len(prompt))
    made.begin(3, DraftRequest(request_id="3", prompt=prompt, params=PARAMS[0], prefix=prefix))
    fed.clear()
    ours = made.propose(context([[*prompt, 9]], slots=[3]))
    assert fed == [2]  # the prompt's last token and the root
    assert_equal(ours, drafter("qwen3_5", num_speculative_tokens=2).propose(context([[*prompt, 9]])), 0, is_exact=True)


@pytest.mark.parametrize("architecture", ["qwen3_5", "lfm2", "bamba"])
def test_part_of_a_text_is_refused(architecture: str) -> None:
    """`bamba` does not list its kinds of layers as others do."""
    model = draft_model(tiny_model(architecture, seed=1), draft_window_size=16)
    with pytest.raises(
        ConfigError, match=r"has recurrent layers, which read a whole text.*leave draft_window_size out"
    ):
        LLM(tiny_model("llama"), drafter=model, trust_drafter=True)
