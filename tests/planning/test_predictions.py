"""Predictions, advice and break-even points on described machines, and costs against recorded measurements."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from foretoken.planning.acceptance import Curve, lengths_of_rates
from foretoken.planning.costs import (
    Iterations,
    MeasuredCosts,
    RooflineCosts,
    TimedDrafter,
    TimedPasses,
    nominal_machine,
)
from foretoken.planning.plan import (
    NO_DRAFT,
    Limits,
    PlannedDraft,
    advise,
    breaks_even_at,
    make_plan,
    predict,
    predictions,
)
from foretoken.planning.sizes import (
    Machine,
    ModelSizes,
    described_sizes,
    drafter_sizes,
    pass_seconds,
    touched_experts,
    training_seconds,
)
from foretoken.runner.costs import CostCurve, PassCosts

ROOT = Path(__file__).parents[2]
LLAMA_8B = ModelSizes(
    layers=32, hidden_size=4096, heads=32, kv_heads=8, head_dim=128, vocab_size=128256, weights=15_009_849_344 / 2
)  # fmt: skip
H100 = nominal_machine(3.35e12, 989e12, 80e9)
DENSE = replace(LLAMA_8B, weights=7.5e9)
NOMINAL = Machine(bytes_per_s=3.35e12, flops_per_s=989e12, memory_bytes=80e9)


def test_a_narrow_pass_reads_weights_and_cache_once() -> None:
    weights, cache = 2 * 7.5e9, 2 * 32 * 8 * 128 * 2 * 1000
    logits = 4 * 128256 * 3
    expected = (weights + cache + logits) / NOMINAL.bytes_per_s
    assert pass_seconds(DENSE, NOMINAL, contexts=[1000], width=1) == pytest.approx(expected, rel=1e-12)
    eight = pass_seconds(DENSE, NOMINAL, contexts=[1000], width=8)
    assert eight == pytest.approx(expected + 7 * logits / NOMINAL.bytes_per_s, rel=1e-12)


def test_a_wide_pass_is_bound_by_arithmetic() -> None:
    seconds = pass_seconds(DENSE, NOMINAL, contexts=[0] * 1000, width=4)
    arithmetic = (2 * 7.5e9 * 4000 + 4 * 32 * 32 * 128 * 4 * 1000 * 2) / NOMINAL.flops_per_s
    assert seconds == pytest.approx(arithmetic + 4 * 4000 * 128256 * 3 / NOMINAL.bytes_per_s, rel=1e-12)


def test_experts_that_a_pass_touches() -> None:
    assert [round(touched_experts(256, 8, tokens)) for tokens in (1, 16, 64)] == [8, 102, 222]
    routes = [set(each) for each in product(range(3), repeat=4)]  # four tokens, one of three experts each
    assert touched_experts(3, 1, 4) == pytest.approx(sum(map(len, routes)) / len(routes), abs=1e-12)
    assert touched_experts(0, 0, 7) == 0
    mixture = ModelSizes(
        layers=1, hidden_size=1, heads=1, kv_heads=1, head_dim=1, vocab_size=0, weights=1e9, experts=256,
        experts_per_token=8, expert_weights=1e8,
    )  # fmt: skip
    plain, wide = (pass_seconds(mixture, NOMINAL, contexts=[0], width=width) for width in (1, 16))
    assert wide / plain == pytest.approx((1e9 + 101.97e8) / (1e9 + 8e8), rel=1e-3)  # both bound by memory


def chain(name: str, rates: list[float]) -> Curve:
    return Curve.of_lengths(name, None, lengths_of_rates(rates), error=0.05, source="made")


def test_free_drafts_on_a_machine_without_arithmetic_limits_gain_what_theorem_3_8_says() -> None:
    machine = Machine(bytes_per_s=1e12, flops_per_s=1e30, memory_bytes=1e12)
    sizes = ModelSizes(layers=1, hidden_size=1, heads=1, kv_heads=1, head_dim=1, vocab_size=0, weights=1e12)
    costs = RooflineCosts(target=sizes, machine=machine, host_s=0.0)
    (best, *_) = predictions([chain("ngram", [0.8] * 5)], costs, batch=1, context=10)
    assert best.draft.depth == 5
    assert best.speed_up == pytest.approx((1 - 0.8**6) / (1 - 0.8), rel=1e-9)
    assert best.ms_per_token == pytest.approx(1e3 / best.tokens_per_s)
    assert best.low < best.tokens_per_s < best.high


def test_a_prediction_is_tokens_over_the_seconds_of_its_parts() -> None:
    costs = RooflineCosts(target=LLAMA_8B, machine=H100)
    draft = PlannedDraft("eagle:chain", 3, 3.0, 2.6, 1.0)
    found = predict(draft, costs, batch=4, context=500)
    head = drafter_sizes("eagle", LLAMA_8B)
    assert head is not None
    seconds = (
        pass_seconds(LLAMA_8B, H100, contexts=[500] * 4, width=4)
        + 3 * pass_seconds(head.reads, H100, contexts=[500] * 4, width=1)
        + costs.host_s
    )
    assert found.tokens_per_s == pytest.approx(4 * 2.6 / seconds, rel=1e-12)
    assert sum(found.seconds) == pytest.approx(seconds, rel=1e-12)


class NoisyCosts(RooflineCosts):
    """As measured on a busy machine: plain decoding was timed while other programs ran."""

    def host(self, draft: PlannedDraft, batch: int) -> float:
        return 1.0 if draft.depth else 2.0


def test_drafts_of_nothing_never_pay() -> None:
    """An iteration with drafts takes no less time than one without, whatever was measured."""
    costs = NoisyCosts(target=LLAMA_8B, machine=H100)
    found = [predict(PlannedDraft("ngram:chain", 1, 0.0, tokens, 0.0), costs, batch=2, context=9) for tokens in (1, 2)]
    assert [each.speed_up for each in found] == pytest.approx([1, 2], rel=1e-9)
    assert not found[0].pays
    assert found[1].tokens_per_s == pytest.approx(2 * 2 / sum(found[1].seconds), rel=1e-9)


@pytest.mark.parametrize("method", ["spire", "self_sparse", "draft_model"])
@pytest.mark.parametrize(("batch", "context"), [(1, 100), (64, 1000), (64, 32_000)])
def test_drafts_within_a_window_gain_the_modelled_multiplier(method: str, batch: int, context: int) -> None:
    """Without host time the speed-up is the multiplier of SPiRe (arXiv 2504.06419)."""
    sizes, draft = drafter_sizes(method, LLAMA_8B), PlannedDraft(f"{method}:chain", 4, 4.0, 2.8, 1.0)
    assert sizes is not None
    assert (sizes.window is None) == (method == "draft_model")
    plain, verify = (pass_seconds(LLAMA_8B, H100, contexts=[context] * batch, width=width) for width in (1, 5))
    seen = [min(context, sizes.window or context)] * batch
    expected = 2.8 * plain / (4 * pass_seconds(sizes.reads, H100, contexts=seen, width=1) + verify)
    found = predict(draft, RooflineCosts(target=LLAMA_8B, machine=H100, host_s=0.0), batch=batch, context=context)
    assert found.speed_up == pytest.approx(expected, rel=1e-12)


def test_a_window_pays_with_many_long_texts() -> None:
    """With the same acceptance, SPiRe's drafts take a constant time and those of a draft model grow with the texts."""
    costs = RooflineCosts(target=LLAMA_8B, machine=H100)
    seconds = {
        (method, context): costs.draft(PlannedDraft(f"{method}:chain", 4, 4.0, 2.8, 1.0), 64, context)
        for method in ("spire", "self_sparse", "draft_model") for context in (1000, 32_000)
    }  # fmt: skip
    assert seconds["spire", 1000] == seconds["spire", 32_000]
    assert seconds["self_sparse", 1000] == seconds["self_sparse", 32_000] > seconds["spire", 1000]
    assert seconds["draft_model", 32_000] > 2 * seconds["draft_model", 1000]


@pytest.mark.parametrize(
    ("pattern", "nodes", "error"), [("plain", 0, 0.05), ("n-gram", 7, 0.05), ("medusa", 63, 0.2), ("eagle", 46, 0.2)]
)
def test_recorded_rates_of_the_h100_are_predicted(pattern: str, nodes: int, error: float) -> None:
    """Against benchmarks/results/gpu-h100.json: scripted drafts for a model of these sizes, context 512 + 80.

    A pass over a tree takes longer than the roofline says, so wide trees are predicted a fifth too fast.
    """
    recorded = json.loads((ROOT / "benchmarks/results/gpu-h100.json").read_text(encoding="utf-8"))
    tables = recorded["sections"]["step"]["tables"]
    assert tables["model"][0]["weight_bytes"] == LLAMA_8B.weights_bytes
    row = next(each for each in tables["efficiency"] if each["pattern"] == pattern)
    costs = RooflineCosts(target=LLAMA_8B, machine=H100)
    draft = PlannedDraft("ngram:chain", nodes, float(nodes), row["tau"], 1.0)  # scripted: drafting costs nothing
    found = predict(draft, costs, batch=1, context=592)
    assert found.tokens_per_s == pytest.approx(row["tokens_per_s"], rel=error)


def test_a_machine_bound_by_arithmetic_should_not_draft() -> None:
    slow = nominal_machine(3.35e12, 10e9, 80e9)  # as much bandwidth, a hundred thousandth of the arithmetic
    costs = RooflineCosts(target=LLAMA_8B, machine=slow)
    curves = [chain("ngram", [0.9] * 8), chain("eagle", [0.8] * 8), chain("draft_model", [0.8] * 8)]
    for batch in (1, 4, 16):
        advice = advise(predictions(curves, costs, batch=batch, context=100))
        assert advice.best is None
        assert "times the seconds of a plain iteration" in advice.reason
    assert breaks_even_at(curves, costs, batch=1, context=100, limits=Limits(64, 4096)) == (None, None)


def test_a_useless_drafter_is_not_taken() -> None:
    costs = RooflineCosts(target=LLAMA_8B, machine=H100)
    assert advise(predictions([chain("eagle", [0.01] * 4)], costs, batch=1, context=100)).best is None
    both = [chain("eagle", [0.01] * 4), chain("hass", [0.7] * 4)]
    advice = advise(predictions(both, costs, batch=1, context=100))
    assert advice.best is not None
    assert advice.best.draft.method == "hass"
    assert advice.second is None


def test_nothing_known_is_said() -> None:
    costs = RooflineCosts(target=LLAMA_8B, machine=H100)
    assert advise(predictions([], costs, batch=1, context=100)).reason == "no drafter has a known acceptance."


@pytest.mark.parametrize("error", [0.0, 0.3])
def test_a_gain_inside_of_its_own_interval_is_not_decided(error: float) -> None:
    costs, limits = RooflineCosts(target=LLAMA_8B, machine=H100), Limits(64, 4096)
    verdicts = []
    for percent in range(0, 100, 2):
        curve = replace(chain("ngram", [percent / 100]), error=error)
        found = predictions([curve], costs, batch=1, context=100)
        drafted, plain = sorted(found, key=lambda each: -each.draft.depth)
        advice = advise(found)
        verdicts.append(advice.verdict)
        assert (advice.verdict == "take") == (drafted.low > plain.tokens_per_s) == (advice.best is not None)
        assert (advice.verdict == "do not draft") == (drafted.speed_up <= 1)
        assert ("`foretoken bench` on the machine decides" in advice.reason) == (advice.verdict == "not decided")
        if advice.verdict != "take":
            assert breaks_even_at([curve], costs, batch=1, context=100, limits=limits) == (None, None)
    assert {"take", "not decided"} <= set(verdicts)
    order = ["do not draft", "not decided", "take"]
    assert verdicts == sorted(verdicts, key=order.index)


def test_the_batch_from_which_drafting_no_longer_pays() -> None:
    """Where a pass over all drafts takes longer than the tokens are worth; checked on both sides."""
    costs = RooflineCosts(target=LLAMA_8B, machine=H100)
    curves = [chain("eagle", [0.6] * 4)]
    limits = Limits(4096, 1 << 17)
    batch, _ = breaks_even_at(curves, costs, batch=1, context=64, limits=limits)
    assert batch is not None
    assert predictions(curves, costs, batch=batch // 2, context=64)[0].pays
    assert not predictions(curves, costs, batch=batch, context=64)[0].pays
    assert breaks_even_at(curves, costs, batch=batch, context=64, limits=limits) == (None, None)


def curve_of_passes(*points: tuple[int, float]) -> CostCurve:
    return CostCurve(*zip(*points, strict=True))


PASSES = TimedPasses(
    near=PassCosts(
        tree=curve_of_passes((1, 0.010), (9, 0.018), (128, 0.137)), step=curve_of_passes((1, 0.010), (4, 0.015)),
        prompt=curve_of_passes((1, 0.010), (512, 0.2)),
    ),
    far=PassCosts(
        tree=curve_of_passes((1, 0.012), (9, 0.022), (128, 0.2)), step=curve_of_passes((1, 0.012), (4, 0.017)),
        prompt=curve_of_passes((1, 0.012), (512, 0.2)),
    ),
    near_context=100, far_context=300,
)  # fmt: skip


def measured_costs(**drafters: TimedDrafter) -> MeasuredCosts:
    return MeasuredCosts(
        target=LLAMA_8B,
        passes=PASSES,
        plain={
            1: Iterations(tokens=1, pass_ratio=1.0, draft_s=0.0, host_s=0.001),
            4: Iterations(tokens=4, pass_ratio=1.2, draft_s=0.0, host_s=0.002),
        },
        free={
            1: Iterations(tokens=5, pass_ratio=1.0, draft_s=0.0001, host_s=0.0015),
            4: Iterations(tokens=20, pass_ratio=1.0, draft_s=0.0002, host_s=0.003),
        },
        drafters={f"{name}:chain": timed for name, timed in drafters.items()},
    )


def test_measured_passes_are_linear_in_the_context() -> None:
    costs = measured_costs()
    assert costs.verify(NO_DRAFT, 1, 100) == pytest.approx(0.010)
    assert costs.verify(NO_DRAFT, 1, 200) == pytest.approx(0.011)
    assert costs.verify(NO_DRAFT, 4, 100) == pytest.approx(1.2 * 0.015)
    assert costs.verify(PlannedDraft("x", 8, 8.0, 2.0, 1.0), 1, 300) == pytest.approx(0.022)


def test_a_lookup_that_seldom_drafts_has_a_wide_pass_where_it_does() -> None:
    seldom = PlannedDraft("ngram:chain", 8, 2.0, 1.5, 0.25)  # eight nodes in a quarter of the passes
    assert PASSES(seldom, 1, 100) == pytest.approx(0.25 * 0.018 + 0.75 * 0.010)


def test_drafts_grow_with_depth_and_batch_from_what_the_engine_took() -> None:
    seen = Iterations(tokens=9, pass_ratio=1.1, draft_s=0.010, host_s=0.003)
    timed = TimedDrafter(lines={1: (0.001, 0.0005), 4: (0.001, 0.0010)}, seen=seen, seen_depth=8)
    costs = measured_costs(hass=timed)

    def draft(depth: int) -> PlannedDraft:
        return PlannedDraft("hass:chain", depth, float(depth), 2.0, 1.0)

    assert costs.draft(draft(8), 1, 100) == pytest.approx(0.010)
    assert costs.draft(draft(2), 1, 100) == pytest.approx(2 * 0.002)  # twice what was timed alone
    assert costs.draft(draft(2), 4, 100) == pytest.approx(2 * 0.003)
    assert costs.draft(draft(2), 7, 100) == pytest.approx(2 * 0.004)
    assert costs.verify(draft(8), 1, 100) == pytest.approx(1.1 * 0.018)  # its factor over the free drafter's passes
    assert costs.verify(draft(8), 4, 100) == pytest.approx(1.1 * PASSES(draft(8), 4, 100))
    assert costs.host(draft(8), 1) == pytest.approx(0.003)
    assert costs.host(draft(8), 4) == pytest.approx(0.003 * 2)  # as the free drafter's host grows
    assert costs.host(NO_DRAFT, 2) == pytest.approx(0.001 + 0.001 / 3)


def test_a_drafter_that_does_not_exist_costs_its_share_of_a_pass() -> None:
    costs, sizes = measured_costs(), drafter_sizes("eagle", LLAMA_8B)
    assert sizes is not None
    share = sizes.reads.weights / LLAMA_8B.weights
    assert 0.05 < share < 0.2
    eagle = PlannedDraft("eagle:chain", 3, 3.0, 2.0, 1.0)
    assert costs.draft(eagle, 1, 100) == pytest.approx(3 * share * 0.010)
    assert costs.draft(PlannedDraft("ngram:chain", 3, 3.0, 2.0, 1.0), 1, 100) == 0.0001


def test_nominal_arithmetic_comes_from_a_prompt() -> None:
    assert measured_costs().flops_per_s == pytest.approx(2 * LLAMA_8B.weights * 512 / 0.2 / 0.8)


def test_medusa_on_an_a100_trains_for_five_hours() -> None:
    """The paper's figure for 7B, with heads as large as LLaMA's vocabulary of 32,000 makes them."""
    vicuna = ModelSizes(
        layers=32, hidden_size=4096, heads=32, kv_heads=32, head_dim=128, vocab_size=32000, weights=6.6e9
    )  # fmt: skip
    heads = drafter_sizes("medusa", vicuna)
    assert heads is not None
    assert training_seconds(vicuna, heads, 312e12) == pytest.approx(5 * 3600, rel=0.15)


def test_sizes_from_a_configuration_are_those_of_the_files() -> None:
    sizes, context = described_sizes(str(ROOT / "models/tinycode"), "auto")
    config = json.loads((ROOT / "models/tinycode/config.json").read_text(encoding="utf-8"))
    assert context == config["max_position_embeddings"]
    assert sizes.weights_bytes == pytest.approx((ROOT / "models/tinycode/model.safetensors").stat().st_size, rel=0.002)
    assert sizes.kv_bytes_per_token == 2 * 12 * 4 * 32 * 2
    assert described_sizes(str(ROOT / "models/tinycode"), "float32")[0].weight_bytes == 4


def test_a_mixture_of_experts_counts_its_experts_apart(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 16, "num_hidden_layers": 3,
        "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 64,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": False, "max_position_embeddings": 128,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    sizes, _ = described_sizes(str(tmp_path), "bfloat16")
    assert (sizes.experts, sizes.experts_per_token) == (8, 2)
    assert sizes.expert_weights == 3 * 3 * 16 * 8  # three matrices in three layers
    attention = 3 * (16 * 16 + 2 * 16 * 8 + 16 * 16 + 2 * 4)
    routers_and_norms = 3 * (16 * 8 + 2 * 16) + 16
    assert sizes.weights == attention + routers_and_norms + 64 * 16  # the LM head; the embedding only looks up rows


def test_a_plan_says_what_fits_into_memory() -> None:
    costs = RooflineCosts(target=LLAMA_8B, machine=H100)
    plan = make_plan(
        [chain("eagle", [0.7] * 4)], {0.0: costs}, LLAMA_8B, batches=[1, 2], context=1000, longest=8192,
        memory_bytes=80e9, peak_flops=989e12,
    )  # fmt: skip
    assert plan.kv_bytes == 131072 * 1000
    assert plan.most_sequences == int((80e9 - 15_009_849_344) / 131_072_000)
    assert [need.name for need in plan.needs] == ["eagle"]
    page = plan.as_dict()["temperatures"][0]
    assert page["batches"][0]["best"] == "eagle:num_speculative_tokens=4"
    best = page["batches"][0]["predictions"][0]
    assert best["nextn"] == 4
    assert best["nextn_accepted"] == pytest.approx(0.7 + 0.49 + 0.343 + 0.2401, abs=1e-4)
