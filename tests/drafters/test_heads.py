"""Drafters over heads: what they accept, which trees they draft, and what they know of every slot."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from drafters.drafting_contexts import attached, begin, context, handle
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.token_tree import DrawKind
from foretoken.drafters.base import READ_SHARE, Committed, MeasuredDrafter
from foretoken.drafters.native.heads import HeadKernels
from foretoken.drafters.registry import create_drafter, drafter_options
from foretoken.drafting.choice import choose_controller
from foretoken.drafting.goodput import Goodput
from foretoken.formats import files, native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.heads.base import StepHead, build_head
from foretoken.heads.hydra import HydraHeads
from foretoken.models.loading import wrap_model
from foretoken.models.parts import target_parts
from foretoken.runner.costs import CostCurve
from foretoken.training.objectives import head_config
from foretoken.trees.choices import PUBLISHED
from tests.tree_checks import check_tree

METHODS = ("medusa", "hydra", "mlp_speculator")
TABLE = [[0.6, 0.2, 0.05], [0.5, 0.1, 0.02]]


def saved(
    directory: Path,
    method: str,
    *,
    architecture: str = "llama",
    seed: int = 0,
    fits_bfloat16: bool = False,
    **more: Any,
) -> Path:
    """A random head for a tiny target; fits_bfloat16: its weights are numbers that bfloat16 holds."""
    target = wrap_model(tiny_model(architecture), name=architecture)
    torch.manual_seed(seed)
    sizes = {"num_heads": 2} if method in METHODS else {"num_steps": 2}
    head = build_head(head_config(method, target, sizes), dtype=torch.float32)
    head.initialize(target_parts(target))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
        if fits_bfloat16:
            parameter.data = parameter.data.to(torch.bfloat16).float()
    native.write_checkpoint(HeadCheckpoint.of_head(head, target=TargetFingerprint.of(target), **more), directory)
    return directory


def drafter(directory: Path, method: str, architecture: str = "llama", changes: Any = None, **keys: Any) -> Any:
    target = wrap_model(tiny_model(architecture), name=architecture)
    options = drafter_options({"method": method, "model": str(directory), **keys})
    return attached(create_drafter(options, target), model=target, vocab_size=target.vocab_size, **(changes or {}))


def commit(made: Any, slot: int, start: int, length: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(length, 1, 32, generator=generator)
    made.commit(Committed(slots=[slot], starts=[start], tokens=[[5] * length], features=features))


@pytest.mark.parametrize("method", METHODS)
def test_the_tree_is_selected_by_acceptance_and_cost(method: str, tmp_path: Path) -> None:
    """Where width is free the whole table is drafted; where each token costs a pass, the best candidate alone."""
    directory = saved(tmp_path / "head", method, acceptance=TABLE)
    free = drafter(directory, method, changes={"measured_costs": lambda: CostCurve((1, 64), (1.0, 1.0 + 1e-7))})
    dear = drafter(directory, method, changes={"measured_costs": lambda: CostCurve((1, 64), (1.0, 64.0))})
    assert free.nodes_by_depth == [1, 4, 13]
    assert dear.shape.choices == ((0,),)
    assert drafter(directory, method, num_speculative_tokens=1).shape.depth == 1


@pytest.mark.parametrize("method", METHODS)
def test_the_table_says_how_often_each_level_is_right(method: str, tmp_path: Path) -> None:
    directory = saved(tmp_path / "head", method, acceptance=TABLE)
    wide = drafter(directory, method, tree=[[0], [1], [0, 0], [0, 1], [1, 0], [1, 1], [1, 2]])
    assert isinstance(wide, MeasuredDrafter)
    assert wide.expected_acceptance == pytest.approx([0.6 + 0.2, 0.5 + 0.1])
    assert drafter(directory, method, tree=[[0]]).expected_acceptance == [0.6]
    assert drafter(directory, method, tree="dynamic").expected_acceptance == []
    assert drafter(saved(tmp_path / "unmeasured", method), method).expected_acceptance == []


@pytest.mark.parametrize("method", METHODS)
def test_without_a_table_the_published_tree(method: str, tmp_path: Path) -> None:
    made = drafter(saved(tmp_path / "head", method), method)
    assert set(made.shape.choices) == {choice for choice in PUBLISHED["mc_sim_7b_63"] if len(choice) <= 2}
    own = drafter(saved(tmp_path / "own", method, choices=[[0], [1], [0, 2]]), method)
    assert own.shape.choices == ((0,), (1,), (0, 2))
    chain = drafter(tmp_path / "head", method, tree="chain")
    assert chain.shape.choices == ((0,), (0, 0)), "no deeper than there are heads"


@pytest.mark.parametrize("method", METHODS)
def test_only_slots_whose_features_came_in_are_drafted_for(method: str, tmp_path: Path) -> None:
    made = drafter(saved(tmp_path / "head", method), method, tree=[[0], [0, 0]])
    commit(made, 0, 0, 4)
    commit(made, 2, 0, 2)
    tokens = [[5, 6, 7, 8, 9], [5, 6, 7], [5, 6, 7, 8]]  # slot 1 has nothing, slot 2 is one position behind
    tree = made.propose(context(tokens, slots=[0, 1, 2]))
    assert tree.num_nodes.tolist() == [3, 1, 1]
    commit(made, 2, 2, 1)
    assert made.propose(context(tokens, slots=[0, 1, 2])).num_nodes.tolist() == [3, 1, 3]
    made.release(0)
    begin(made, 0)
    assert made.propose(context(tokens, slots=[0, 1, 2])).num_nodes.tolist() == [1, 1, 3]


@pytest.mark.parametrize("tree", ["mc_sim_7b_63", "dynamic"])
@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_is_drafted_for_as_if_alone(method: str, tree: str, tmp_path: Path) -> None:
    """Neighbours, their depths and proposals that were thrown away change nothing."""
    directory = saved(tmp_path / "head", method)
    double = {"dtype": torch.float64}  # products of several rows round differently, and candidates may be close
    texts = [[5, 6, 7, 8, 9], [11, 12, 13], [20, 21, 22, 23]]
    alone = []
    for slot, text in enumerate(texts):
        made = drafter(directory, method, tree=tree, changes=double)
        commit(made, slot, 0, len(text) - 1, seed=slot)
        alone.append(made.propose(context([text], slots=[slot])).tokens[0])
    together = drafter(directory, method, tree=tree, changes=double)
    for slot, text in enumerate(texts):
        commit(together, slot, 0, len(text) - 1, seed=slot)
    for _ in range(2):
        drafts = together.propose(context(texts))
        assert all(torch.equal(row, expected) for row, expected in zip(drafts.tokens, alone, strict=True))
    cut = together.propose(context(texts, max_depth=[0, 1, 2]))
    assert cut.depths.amax(1).tolist() == [0, 1, 2]
    assert torch.equal(cut.tokens[2], alone[2])


@pytest.mark.parametrize("method", METHODS)
def test_sampled_requests_draft_by_a_distribution(method: str, tmp_path: Path) -> None:
    """Without a seed children are drawn, and the tree says from what; "greedy" takes the best, drawn from nothing."""
    directory = saved(tmp_path / "head", method)
    params = [SamplingParams(temperature=0.9)]
    for how, has_distribution in (("probabilistic", True), ("greedy", False)):
        made = drafter(directory, method, tree=[[0], [1], [0, 0]], draft_sample_method=how)
        commit(made, 0, 0, 2)
        tree = made.propose(context([[5, 6, 7]], params=params))
        assert (tree.distributions is not None) == has_distribution
        if tree.distributions is not None:
            kinds = tree.distributions.kinds[0, 1:].tolist()
            assert kinds == [DrawKind.WITHOUT_REPLACEMENT, DrawKind.WITHOUT_REPLACEMENT, DrawKind.INDEPENDENT]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("params", "is_coupled", "is_native"),
    [
        ({"temperature": 0.0}, False, True),
        ({"temperature": 0.9}, False, True),
        ({"temperature": 0.9, "seed": 5}, True, True),
        ({"temperature": 0.9, "repetition_penalty": 1.2}, False, True),  # drafts never see processors
        ({"temperature": 0.9, "top_p": 0.8}, False, False),
        ({"temperature": 0.9, "top_k": 4}, True, False),
        ({"temperature": 0.9, "min_p": 0.1}, False, False),
        ({"temperature": 0.0, "top_k": 4}, False, True),
    ],
)
def test_whole_drafts_are_native_calls(
    method: str, params: dict[str, Any], is_coupled: bool, is_native: bool, tmp_path: Path
) -> None:
    """On a CPU, but for truncated distributions; the trees are those of torch's operations."""
    made = drafter(saved(tmp_path / "head", method), method, tree=[[0], [1], [0, 0]])
    commit(made, 0, 0, 2)
    asked = context([[5, 6, 7]], params=[SamplingParams(**params)], is_coupled=[is_coupled])
    with mock.patch.object(HeadKernels, "fill", autospec=True, side_effect=HeadKernels.fill) as call:
        ours = made.propose(asked)
    assert call.call_count == is_native
    made._kernels = None
    theirs = made.propose(asked)
    assert torch.equal(ours.tokens, theirs.tokens)
    assert ours.scores is not None
    torch.testing.assert_close(ours.scores, theirs.scores, rtol=1e-4, atol=1e-4)
    assert (ours.distributions is None) == (theirs.distributions is None)
    if ours.distributions is not None and theirs.distributions is not None:
        torch.testing.assert_close(ours.distributions.rows, theirs.distributions.rows, rtol=1e-4, atol=1e-5)


def test_a_head_that_is_not_described_drafts_by_steps(tmp_path: Path) -> None:
    """Nobody who writes a head has to tell the native kernels of it."""
    with mock.patch.object(HydraHeads, "native_steps", StepHead.native_steps):
        made = drafter(saved(tmp_path / "head", "hydra"), "hydra")
    assert made._kernels is None
    commit(made, 0, 0, 2)
    assert made.propose(context([[5, 6, 7]])).num_nodes.item() > 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9)])
def test_dynamic_trees(method: str, params: SamplingParams, tmp_path: Path) -> None:
    """As many nodes as were asked for, level by level; chosen, not drawn, so that nothing states a distribution."""
    made = drafter(saved(tmp_path / "head", method), method, tree="dynamic", max_nodes=30, tree_top_k=4)
    assert made.nodes_by_depth == [1, 5, 21]
    made = drafter(tmp_path / "head", method, tree="dynamic", max_nodes=30, num_speculative_tokens=2)
    assert made.nodes_by_depth == [1, 11, 30]
    commit(made, 0, 0, 2)
    tree = made.propose(context([[5, 6, 7]], params=[params]))
    check_tree(tree)
    assert tree.num_nodes.tolist() == [30]
    assert tree.distributions is None


def test_heads_for_others_are_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path / "head", "medusa")
    with pytest.raises(ConfigError, match=r"weights \w+ instead of"):
        drafter(saved(tmp_path / "qwen", "medusa", architecture="qwen2"), "medusa")
    with pytest.raises(ConfigError, match=r"holds a head of method 'medusa'\. Expected one of 'hydra'"):
        drafter(directory, "hydra")
    with pytest.raises(ConfigError, match=r"the tree is 3 deep, but .* has 2 heads"):
        drafter(directory, "medusa", tree=[[0], [0, 0], [0, 0, 0]])
    nameless = drafter_options({"method": "medusa"})
    with pytest.raises(ConfigError, match="needs a trained head"):
        create_drafter(nameless, handle().model).attach(handle())
    assert drafter(tmp_path / "qwen", "medusa", allow_other_target=True).nodes_by_depth[-1] > 2
    config = json.loads((directory / "config.json").read_text())
    config["config"]["hidden_size"] = 16
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"wrong shape: bias \[2, 1, 32\] instead of \[2, 1, 16\], weight"):
        drafter(directory, "medusa")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tree", ["tree", "chain", "mc_sim_7b_63", "dynamic"])
def test_more_tokens_than_heads_are_refused(method: str, tree: str, tmp_path: Path) -> None:
    """They meant fewer, in silence."""
    directory = saved(tmp_path / "head", method)
    assert drafter(directory, method, tree=tree, num_speculative_tokens=2).shape.depth == 2
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is 3, but .* has 2 heads, .* Expected at most 2\."):
        drafter(directory, method, tree=tree, num_speculative_tokens=3)


def test_a_head_of_another_vocabulary(tmp_path: Path) -> None:
    target = wrap_model(tiny_model("llama", vocab_size=71), name="larger")
    directory = saved(tmp_path / "head", "medusa")
    with pytest.raises(ConfigError, match="vocab_size 67 instead of 71"):
        LLM(target, speculative_config={"method": "medusa", "model": str(directory)})


@pytest.mark.parametrize("method", METHODS)
def test_heads_by_hub_id(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The revision that the options name is the one that drafts."""
    heads = {None: 0, "v1": 1}
    directories = {revision: saved(tmp_path / str(seed), method, seed=seed) for revision, seed in heads.items()}
    monkeypatch.setattr(files, "snapshot_download", lambda name, *, revision, **_: str(directories[revision]))
    options: tuple[dict[str, str], ...] = ({}, {"revision": "v1"})
    made = [drafter(Path("some/head"), method, quantization="none", **keys) for keys in options]
    state, token = torch.ones(1, 32), torch.tensor([5])
    first, second = (one.head.step(0, state, token, one.parts)[1] for one in made)
    assert not torch.equal(first, second)
    assert drafter(Path("some/head"), method, revision="v1").shape.depth == 2


@pytest.mark.parametrize(
    ("method", "share"),
    [("medusa", 0.0), ("mlp_speculator", 0.0), ("hydra", 0.1), ("eagle", 0.1), ("falcon", READ_SHARE)],
)
def test_the_controller_knows_what_heads_read(
    method: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, keys and values alone, or every position."""
    monkeypatch.setattr("foretoken.drafting.choice.time_drafts", lambda *_: [(1, 1e-3)])
    made = drafter(saved(tmp_path / "head", method), method)
    controller = choose_controller([made.options], [made], handle(), keeps_acceptance=False)
    assert isinstance(controller, Goodput)
    assert controller._costs._read_shares == [share]
