"""A drafter over a drafter: guesses change how many passes a chain takes, and nothing that is drafted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters.drafting_contexts import attached, begin, context
from drafters.test_sparse_kv import CONTEXT_LEN, ON_CPUS, target_of
from pairwise import slow_products
from tiny_models import VOCAB_SIZE, tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError, ModelError
from foretoken.drafters.self_drafts import Chain
from foretoken.drafters.sparse_kv import DraftBytes, Options, SparseKvDrafter
from foretoken.runner.runner import Runner
from foretoken.sampling.noise import KeyedNoise, Purpose
from foretoken.trees.stopping import StopRule
from tests.tree_checks import assert_same_tree

DICE = torch.Generator().manual_seed(5)
PHRASE = torch.randint(1, VOCAB_SIZE, (11,), generator=DICE).tolist()
TEXTS = [PHRASE * 5, torch.randint(1, VOCAB_SIZE, (40,), generator=DICE).tolist(), [*PHRASE * 8, 7, 3, 9, 2, 11]]
DEPTH = 9
SAMPLED = {"temperature": 0.8}


def made(target: Runner, **options: Any) -> SparseKvDrafter:
    """A drafter on a target that has read all texts but their roots; counts the passes of drafts."""
    for slot, text in enumerate(TEXTS):
        target.prefill(slot, text[:-1], 0)
    values = {"method": "sparse_kv", "kv_budget": 16, "num_speculative_tokens": DEPTH, **options}
    drafter = attached(
        SparseKvDrafter(Options(**values)), model=target.model, target_runner=target, runner=target.name,
        context_len=CONTEXT_LEN, num_slots=3,
    )  # fmt: skip
    for slot, text in enumerate(TEXTS):
        begin(drafter, slot, text)
    return drafter


class Told:
    """Guesses the drafts that are told, with errors at some depths."""

    def __init__(self, drafts: Sequence[Sequence[int]], wrong: Sequence[int]) -> None:
        self._drafts, self._wrong = drafts, wrong
        self.num_asked = 0

    def begin(self, slot: int, request: Any) -> None:
        pass

    def after(self, chains: Sequence[Chain], counts: Sequence[int], draws: Any) -> list[list[int]]:
        self.num_asked += 1
        found = []
        for each, count in zip(chains, counts, strict=True):
            depths = range(len(each.path), len(each.path) + count)
            draft = self._drafts[each.slot]
            found.append([(draft[depth] + (depth in self._wrong)) % VOCAB_SIZE for depth in depths])
        return found


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"params": [SamplingParams(seed=seed, **SAMPLED) for seed in (3, 4, 5)]},
    "coupled": {"params": [SamplingParams(seed=seed, **SAMPLED) for seed in (3, 4, 5)], "is_coupled": [True] * 3},
    "mixed": {
        "params": [
            SamplingParams(seed=1, **SAMPLED), SamplingParams(temperature=0.0),
            SamplingParams(seed=2, top_k=3, **SAMPLED),
        ],
        "is_coupled": [True, False, False],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("max_depth", "requests", "decoder"),
    slow_products([DEPTH, [9, 1, 4], [0, 7, 3]], list(REQUESTS), ON_CPUS, each=1),
)
def test_chains_are_those_without_guesses(decoder: str, requests: str, max_depth: int | Sequence[int]) -> None:
    """Whatever is guessed. The last text ends three tokens before the context does."""
    assert len(TEXTS[2]) == CONTEXT_LEN - 3
    module = tiny_model("llama")
    asked = context(TEXTS, max_depth=max_depth, **REQUESTS[requests])
    expected = made(target_of(module, decoder)).propose(asked)
    assert expected.num_nodes.max() > 1
    drafts = made(target_of(module, decoder)).propose(context(TEXTS, max_depth=DEPTH, **REQUESTS[requests]))
    for wrong in (range(0), range(DEPTH), [2], [0, 1, 6]):
        drafter = made(target_of(module, decoder), draft_with="ngram")
        drafter._drafts._guesses = Told([[*row[1:], *[0] * DEPTH] for row in drafts.tokens.tolist()], wrong)
        assert_same_tree(drafter.propose(asked), expected, 1e-4)
    assert_same_tree(made(target_of(module, decoder), draft_with="ngram").propose(asked), expected, 1e-4)


@pytest.mark.parametrize(("wrong", "num_passes"), [(range(0), 2), (range(DEPTH), 9), ([2], 3), ([0, 1, 6], 4)], ids=str)
def test_one_pass_checks_several_guesses(wrong: Sequence[int], num_passes: int) -> None:
    module, texts = tiny_model("llama"), TEXTS[:1]
    asked = context(texts, max_depth=DEPTH)
    drafter = made(target_of(module), draft_with="ngram")
    drafts = drafter.propose(asked).tokens[:, 1:].tolist()
    drafter._drafts._guesses = told = Told(drafts, wrong)
    drafter.propose(asked)
    assert told.num_asked == num_passes


@pytest.mark.parametrize(
    "options", [{"pruning": {"token_probability": 0.145}}, {"stop": StopRule.of("confidence", 0.145)}]
)
def test_drafts_end_early_as_without_guesses(options: dict[str, Any]) -> None:
    module, asked = tiny_model("llama"), context(TEXTS, max_depth=DEPTH)
    expected = made(target_of(module), **options).propose(asked)
    assert 1 < expected.num_nodes.max() < DEPTH + 1
    assert_same_tree(made(target_of(module), draft_with="ngram", **options).propose(asked), expected, 1e-4)


def test_the_model_of_bytes_counts_passes() -> None:
    plain, drafter = (made(target_of(tiny_model("llama")), draft_with=draft_with) for draft_with in (None, "ngram"))
    plain._costs = drafter._costs = DraftBytes(weights=(10.0, 10.0), row=(1.0, 1.0))
    share = (10 + 16) / (10 + 74) / 2
    assert drafter.modelled_speedup([74]) == pytest.approx(
        max((1 - 0.9 ** (k + 1)) / 0.1 / (k * share + 1) for k in range(1, DEPTH + 1))
    )
    assert drafter.modelled_speedup([74]) > plain.modelled_speedup([74])


def test_the_first_blocks_draft_with_guesses() -> None:
    module, asked = tiny_model("llama"), context(TEXTS, max_depth=DEPTH)
    expected = made(target_of(module), exit_layer=2).propose(asked)
    assert_same_tree(made(target_of(module), exit_layer=2, draft_with="ngram").propose(asked), expected, 1e-4)


@pytest.fixture(scope="module")
def draft_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("draft")
    tiny_model("llama").save_pretrained(directory)
    return directory


@pytest.mark.parametrize("decoder", ON_CPUS)
def test_a_draft_model_guesses(decoder: str, draft_directory: Path) -> None:
    """Texts grow by accepted tokens and by others; the draft model is the target, which often foresees its drafts."""
    module, texts = tiny_model("llama"), [list(text) for text in TEXTS]
    target = target_of(module, decoder)
    plain, drafter = made(target), made(target, draft_with=str(draft_directory))
    num_passes, run = 0, drafter._runner.run

    def counted(work: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        return run(work)

    drafter._runner.run = counted  # type: ignore[method-assign]  # counts the passes
    num_drafted = 0
    for turn in range(4):
        asked = context(texts, max_depth=DEPTH, **REQUESTS["mixed"])
        tree = drafter.propose(asked)
        assert_same_tree(tree, plain.propose(asked), 1e-4)
        num_drafted += tree.max_depth
        for slot, text in enumerate(texts[:2]):
            new = [*tree.tokens[slot, 1 : 1 + (turn + slot) % 4].tolist(), 7]
            target.prefill(slot, [text[-1], *new[:-1]], len(text) - 1)
            text.extend(new)
    assert num_passes < num_drafted


def test_the_engine_writes_the_same_texts(draft_directory: Path) -> None:
    module = tiny_model("llama")
    params = [SamplingParams(temperature=temperature, seed=4, max_tokens=24) for temperature in (0.0, 0.8)]
    texts = [text[:50] for text in TEXTS[:2]]
    written = []
    for draft_with in (None, "ngram", str(draft_directory)):
        config = {"method": "sparse_kv", "kv_budget": 12, "num_speculative_tokens": 8, "draft_with": draft_with}
        outputs = LLM(module, speculative_config=config, max_num_seqs=2).generate(texts, params)
        assert not any(output.metrics.draft_errors for output in outputs)
        written.append([(output.outputs[0].token_ids, output.metrics.num_accepted) for output in outputs])
    assert written[1:] == written[:1] * 2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"draft_with": "ngram", "tree": "tree"}, ConfigError, "'tree' is 'tree', but 'draft_with' drafts chains"),
        ({"draft_with": "./nowhere"}, ModelError, "nowhere"),
        ({"draft_with": ""}, ConfigError, "draft_with"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(tiny_model("llama"), speculative_config={"method": "sparse_kv", **options})


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    tiny_model("llama", vocab_size=VOCAB_SIZE + 9).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a model with another vocabulary"):
        LLM(tiny_model("llama"), speculative_config={"method": "sparse_kv", "draft_with": str(tmp_path)})


def test_a_lane_for_each_sequence() -> None:
    noise, positions = KeyedNoise(torch.tensor([3, -4, 5])), torch.tensor([7, 8, 900])
    lanes = [2, 0, 31]
    for signed in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if signed:
                patch.setattr("foretoken.sampling.noise.runs_cpu_kernels", lambda _: False)
            together = noise.gumbel(positions, Purpose.DRAFT, 9, lane=torch.tensor(lanes))
            for row, lane in enumerate(lanes):
                assert together[row].equal(noise.gumbel(positions, Purpose.DRAFT, 9, lane=lane)[row])
