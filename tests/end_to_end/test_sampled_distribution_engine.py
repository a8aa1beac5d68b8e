"""Sampling without coupling, through the whole loop: the distribution of the first tokens is the target's, exactly.

The non-coupled rules are forced and every request has its own seed, so a run is reproducible and its draws are
independent. Chi-square over all texts of three tokens at level 1e-6; cells expected below 5 are pooled. n samples of a
distribution q instead of p have a noncentrality of n sum (q - p)^2 / p, at least 4 n d^2 at total-variation distance d.
3,000 samples leave at most 17 degrees of freedom: the level is a statistic of 60.1, which a noncentrality of 98.7
misses with probability 1e-3, so that all with d > 0.091 is found. The broken rules, which must be found at the same
setting, have noncentralities of about 680 (block), 260 (tree) and 220 (pruned), estimated from 4,000 samples. Noise
that two drafters share makes less of a difference: of 18,000 samples, which that test draws, it has one of 254 at 28
degrees of freedom, where 112 is missed with probability 1e-3. Slow because distributions take thousands of texts.
"""

import copy
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from math import log
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from chi_square import chi_square_level
from end_to_end.stop_rules import stop_rule
from end_to_end.tiny_llms import EndsEarly, draft_model
from made_once import new_folder
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.records import GenerationMetrics
from foretoken.drafters.native.heads import HeadKernels
from foretoken.drafting.base import Fixed
from foretoken.drafting.drafting import DraftNoise
from foretoken.engine.loop import Engine
from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.heads.base import build_head
from foretoken.models.loading import wrap_model
from foretoken.training.objectives import head_config
from foretoken.trees.expansion import TreeExpansion
from foretoken.trees.stopping import PathFloors

VOCAB, LENGTH, COPIES, PROMPT, TEMPERATURE = 4, 3, 100, [1], 0.7
SAMPLES, LEVEL = 3_000, 1e-6
SETTINGS: dict[str, dict[str, Any]] = {
    "block": {"num_speculative_tokens": 2},
    "sequential": {"num_speculative_tokens": 2},
    "sequential, tree": {"tree": {"widths": [2, 2]}},
    "sequential, gaps in the ranks": {"tree": [[0], [2], [2, 1], [2, 3]]},
    "sequential, dynamic tree": {"tree": "dynamic", "num_speculative_tokens": 2, "tree_top_k": 2, "max_nodes": 5},
    "sequential, top-k": {"num_speculative_tokens": 2},
    "traversal": {"num_speculative_tokens": 2},
    "traversal, tree": {"tree": {"widths": [2, 2]}},
    "traversal, top-k": {"tree": {"widths": [4, 1]}},  # the last of four children is chosen, not drawn
    "coupled": {"tree": {"widths": [2, 2]}},
}
PRUNED = "sequential, pruned"
STOPPED = {
    "block, stopped": {"num_speculative_tokens": 2, "stop": stop_rule("disco")},
    "sequential, stopped tree": {"tree": {"widths": [2, 2]}, "stop": stop_rule("specdec_pp")},
}
SETTINGS_OF_ALL = {
    **SETTINGS,
    **STOPPED,
    **{
        name: {"tree": {"widths": [2, 2]}, "pruning": {"token_probability": 0.2, "entropy_weighted": 0.9}}
        for name in (PRUNED, "traversal, pruned")
    },
}
# Heads with weights of their own, whose whole trees are one call of the native kernels in any dtype of the target.
LONGER_PROMPT = [1, 2, 3]  # its last position but one has a feature, so that the first pass already has a tree
SPREAD = {"medusa": 0.1, "mlp_speculator": 0.3}  # of weights: sharper distributions would be rejected nearly always
HEADS: dict[str, dict[str, Any]] = {"medusa": {"own_lm_head": True}, "mlp_speculator": {"inner_dim": 16}}


@cache
def small(seed: int) -> Any:
    """One layer and four tokens, float64."""
    return tiny_model("llama", seed=seed, dtype=torch.float64, vocab_size=VOCAB, num_hidden_layers=1)


@cache
def head_directory(method: str) -> Path:
    """A random head for the target."""
    target = wrap_model(small(0), name="small")
    made = build_head(head_config(method, target, {"num_heads": 2, **HEADS[method]}), dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=SPREAD[method], generator=generator)
    directory = new_folder(method)
    native.write_checkpoint(HeadCheckpoint.of_head(made, target=TargetFingerprint.of(target)), directory)
    return directory


def options(setting: str) -> dict[str, Any]:
    """Sampling parameters of a setting."""
    return {"temperature": TEMPERATURE, "top_k": 3 if setting.endswith("top-k") else 0}


def sample(
    setting: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_native: bool = False,
    head: str | None = None,
    drafters: Sequence[dict[str, Any]] = (),
    max_nodes: Sequence[int | None] = (None,),
    num_samples: int = SAMPLES,
) -> tuple[Counter[tuple[int, ...]], GenerationMetrics]:
    """Draws texts from the engine under a setting's rule; natively in float32, which rounds to that.

    The draft model, or the head, is a random one: most drafts are rejected, so residuals decide most tokens. Requests
    have the bounds `max_nodes` in turn.
    """
    rule = setting.split(",")[0]
    original = Engine.__init__

    def with_rule(self: Engine, *args: Any, policy: Any, **more: Any) -> None:
        original(self, *args, policy=type(policy)(rule=rule), **more)

    monkeypatch.setattr(Engine, "__init__", with_rule)
    prompt = PROMPT if head is None and not drafters else LONGER_PROMPT
    target, draft = (copy.deepcopy(small(seed)).float() if is_native else small(seed) for seed in (0, 1))
    drafter: dict[str, Any] = {"drafter": draft_model(draft, **SETTINGS_OF_ALL[setting]), "trust_drafter": True}
    if head is not None:
        config = {"method": head, "model": str(head_directory(head)), "tree": "chain", **SETTINGS_OF_ALL[setting]}
        drafter = {"speculative_config": config}
    if drafters:
        drafter = {"speculative_config": {"drafters": list(drafters)}}
    llm = LLM(target, **drafter, max_num_seqs=64, max_model_len=16, runner="lean-native" if is_native else "auto")
    params = [
        SamplingParams(**options(setting), n=COPIES, seed=seed, max_tokens=LENGTH, ignore_eos=True)
        for seed in range(num_samples // COPIES)
    ]
    bounds = [{"max_nodes": max_nodes[i % len(max_nodes)]} for i in range(len(params))]
    outputs = llm.generate([{"prompt_token_ids": prompt, "speculative": each} for each in bounds], params)
    texts = Counter(tuple(c.token_ids) for output in outputs for c in output.outputs)
    return texts, GenerationMetrics.total(output.metrics for output in outputs)


def exact_distribution(setting: str, prompt: Sequence[int] = PROMPT) -> dict[tuple[int, ...], float]:
    """The target distribution of the first tokens, from plain forwards of every text."""
    texts = list(product(range(VOCAB), repeat=LENGTH))
    module = small(0)
    name = module.config._attn_implementation
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = module(torch.tensor([[*prompt, *text] for text in texts])).logits
    module.set_attn_implementation(name)
    logits = logits[:, len(prompt) - 1 : -1] / TEMPERATURE
    if top_k := options(setting)["top_k"]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], float("-inf"))
    chosen = logits.log_softmax(2).gather(2, torch.tensor(texts).unsqueeze(2))
    return dict(zip(texts, chosen.sum((1, 2)).exp().tolist(), strict=True))


@pytest.mark.parametrize(
    ("setting", "is_native"),
    [
        pytest.param(setting, (place + turn) % 2 == 1, marks=pytest.mark.slow if turn else [])
        for place, setting in enumerate(SETTINGS) for turn in range(2)
    ],
    ids=lambda each: each if isinstance(each, str) else ("torch", "native")[each],
)  # fmt: skip
def test_distribution_is_the_targets(setting: str, is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With trees drafted by torch, in float64, and by the native kernels, in float32."""
    distribution = exact_distribution(setting)
    assert sum(distribution.values()) == pytest.approx(1.0)
    texts, metrics = sample(setting, monkeypatch, is_native=is_native)
    assert chi_square_level(texts, distribution) > LEVEL
    assert 0.1 < metrics.num_accepted / metrics.num_emitted < 0.66, "both acceptances and residuals are exercised"


@pytest.mark.parametrize(
    ("setting", "head"),
    [
        pytest.param(setting, list(HEADS)[(place + turn) % 2], marks=pytest.mark.slow if turn else [])
        for place, setting in enumerate(["block", "sequential, tree", "traversal, tree"]) for turn in range(2)
    ],
)  # fmt: skip
def test_trees_that_a_head_drafts_natively(setting: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of logits a level for Medusa, one a node for the speculator; whole trees, whatever passes cost here."""
    monkeypatch.setattr("foretoken.entrypoints.llm.choose_controller", lambda *_, **__: Fixed(64))
    with mock.patch.object(HeadKernels, "fill", autospec=True, side_effect=HeadKernels.fill) as native_call:
        texts, metrics = sample(setting, monkeypatch, head=head)
    assert native_call.called
    assert metrics.drafted_at_depth[2], "more than one level was drafted"
    assert chi_square_level(texts, exact_distribution(setting, LONGER_PROMPT)) > LEVEL
    assert 0.1 < metrics.num_accepted / metrics.num_emitted < 0.66, "both acceptances and residuals are exercised"


@pytest.mark.parametrize(
    ("rule", "is_broken"),
    [
        pytest.param("sequential", False, marks=pytest.mark.slow),
        pytest.param("sequential", True, marks=pytest.mark.slow),
        pytest.param("traversal", False, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_two_drafters_that_draw(rule: str, is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of one distribution beside lookups, all in one tree; noise that both share is found."""
    monkeypatch.setattr("foretoken.entrypoints.llm.choose_controller", lambda *_, **__: Fixed(64))
    if is_broken:
        monkeypatch.setattr(DraftNoise, "of", lambda self, context, drafter: context)
    heads = {"method": "medusa", "model": str(head_directory("medusa")), "tree": {"widths": [1, 1]}}
    drafters = [{"method": "ngram"}, heads, {"method": "suffix"}, heads]
    texts, metrics = sample(rule, monkeypatch, drafters=drafters, num_samples=18_000)
    assert (chi_square_level(texts, exact_distribution("sequential", LONGER_PROMPT)) > LEVEL) is not is_broken
    assert metrics.num_drafted > 2 * metrics.steps, "both drew"


@pytest.mark.parametrize(
    ("setting", "is_broken"),
    [
        (PRUNED, False), (PRUNED, True), ("traversal, pruned", False),
        pytest.param("traversal, pruned", True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_draws_that_fall_short_stay(setting: str, is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pruned trees of sampled requests; to leave out draws for their own tokens is found."""
    if is_broken:
        monkeypatch.setattr(TreeExpansion, "_keep_drawn", lambda self, level, is_drawn: None)
    texts, metrics = sample(setting, monkeypatch, is_native=True)
    assert (chi_square_level(texts, exact_distribution(setting)) > LEVEL) is not is_broken
    assert metrics.num_drafted < 5.5 * metrics.steps, "of six nodes some were pruned"


@pytest.mark.parametrize("rule", ["sequential", "block", "traversal"])
def test_drafts_of_some_tokens(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four tokens are drafted, others once texts have them; the draft distribution changes within a text."""
    shape: dict[str, Any] = {"num_speculative_tokens": 2} if rule == "block" else {"tree": {"widths": [2, 2]}}
    monkeypatch.setitem(SETTINGS_OF_ALL, f"{rule}, some tokens", {**shape, "draft_vocab_size": 2})
    texts, metrics = sample(f"{rule}, some tokens", monkeypatch, is_native=True)
    assert chi_square_level(texts, exact_distribution(rule)) > LEVEL
    assert 0.1 < metrics.num_accepted / metrics.num_emitted < 0.66, "both acceptances and residuals are exercised"


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("rule", ["sequential", "block"])
def test_chains_that_end_by_their_path(rule: str, is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a drawn token of a probability below 0.4 nothing is drafted."""
    monkeypatch.setattr("end_to_end.tiny_llms.FLOORS", PathFloors(1.0, [0.0] * 2, [log(0.4)] * 2))
    made = draft_model
    monkeypatch.setattr(f"{__name__}.draft_model", lambda *a, **b: lambda: EndsEarly(made(*a, **b)()))
    texts, metrics = sample(rule, monkeypatch, is_native=is_native)
    assert chi_square_level(texts, exact_distribution(rule)) > LEVEL
    assert 0 < metrics.drafted_at_depth[2] < 0.8 * metrics.drafted_at_depth[1], "some chains end, others go on"


def test_trees_that_requests_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of a drawn tree whose end was cut, beside trees that are whole; draws decide which are longer."""
    texts, metrics = sample(PRUNED, monkeypatch, max_nodes=[None, 2, 3, 4])
    assert chi_square_level(texts, exact_distribution(PRUNED)) > LEVEL
    assert 0.1 < metrics.num_accepted / metrics.num_emitted < 0.66, "both acceptances and residuals are exercised"


@pytest.mark.parametrize(
    "setting",
    [
        "sequential, tree",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("block", "traversal, tree")),
    ],
)
def test_broken_residual_is_found(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Correction tokens from the target's own distribution instead of the residual."""
    monkeypatch.setattr("foretoken.acceptance.sampled_rules.residual", lambda p, q: p / p.sum(1, keepdim=True))
    texts, _ = sample(setting, monkeypatch)
    assert chi_square_level(texts, exact_distribution(setting)) < LEVEL


@pytest.mark.parametrize(
    ("setting", "is_broken"),
    [
        ("block, stopped", False), ("sequential, stopped tree", False), ("sequential, stopped tree", True),
        pytest.param("block, stopped", True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_draw_that_ends_a_draft_is_verified(setting: str, is_broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of sampled requests that a stop rule ends; to leave out the draw that ended the draft is found."""
    if is_broken:

        def leave_out(self: TreeExpansion, level: Any, is_drawn: torch.Tensor) -> None:
            self._is_kept[:, level.children] &= self._goes_on[:, level.children]

        monkeypatch.setattr(TreeExpansion, "_keep_drawn", leave_out)
    texts, metrics = sample(setting, monkeypatch, is_native=True)
    assert (chi_square_level(texts, exact_distribution(setting)) > LEVEL) is not is_broken
    assert 0 < metrics.drafted_at_depth[2] < metrics.drafted_at_depth[1], "some drafts end early, and others do not"
