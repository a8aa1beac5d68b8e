"""Each fault of a configuration that raises no error, planted in a bundled head, is named; healthy heads pass.

Slow because bundled heads are examined on text that the bundled target writes, once for each variant.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import trained_heads
from made_once import made_once
from trained_heads import MAX_TOKENS, PROMPTS, good, target, tokenizer, trained

from foretoken.bench.workload import load_prompts
from foretoken.entrypoints.model_arguments import load_target
from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint
from foretoken.formats.registry import read_head
from foretoken.heads.mtp import MtpLayerConfig
from foretoken.training.doctor.checks import Check, check_acceptance, check_agreement, check_template
from foretoken.training.doctor.examine import Examination, examine
from foretoken.training.doctor.readings import Texts, compare, greedy_texts, reordered_rows


def test_rows_in_another_order_are_those_that_turn() -> None:
    """Of heads for multi-token prediction a part of each head; gates lie behind the queries of each head."""
    layer = MtpLayerConfig(num_attention_heads=2, num_key_value_heads=1, head_dim=6, intermediate_size=1, rotary_dim=4)
    first, keys, queries = [0, 2, 1, 3, 4, 5], torch.arange(6), torch.arange(24)
    assert reordered_rows(keys, (2, -1), layer).tolist() == first
    pairs = reordered_rows(queries, (2, -1), layer)
    assert pairs.tolist() == [*first, *range(6, 12), *(12 + row for row in first), *range(18, 24)]
    assert torch.equal(reordered_rows(pairs.unsqueeze(1), (-1, 2), layer), queries.unsqueeze(1))


@cache
def tinycode() -> tuple[Any, Any]:
    return load_target("models/tinycode", dtype="auto", device="auto")


@cache
def texts() -> Texts:
    """The beginnings of a dozen prompts with the target's continuations, which one process of a run writes."""

    def write(directory: Path) -> None:
        target, codec = tinycode()
        begun = [codec(prompt)["input_ids"][:32] for prompt in load_prompts(limit=12)]
        made = greedy_texts(target, codec, begun, max_tokens=64, runner="auto")
        torch.save((made.prompts, made.texts), directory / "texts.pt")

    prompts, written = torch.load(made_once("tinycode-texts", "12 of 32 and 64", write) / "texts.pt")
    return Texts(prompts=prompts, texts=written, device=torch.device("cpu"))


def head(method: str) -> HeadCheckpoint:
    return read_head(Path(f"models/tinycode-{method}"))[1]


def with_options(checkpoint: HeadCheckpoint, **options: Any) -> HeadCheckpoint:
    return replace(checkpoint, config=checkpoint.config.model_copy(update=options))


def with_rotary(method: str, **options: Any) -> HeadCheckpoint:
    config: Any = head(method).config
    return with_options(head(method), layer=config.layer.model_copy(update=options))


def with_other_lm_head() -> HeadCheckpoint:
    """Row i of the LM head stands for token i + 1, as after a conversion by another tokenizer."""
    weights = dict(head("eagle3").weights)
    return replace(head("eagle3"), weights=weights | {"lm_head.weight": weights["lm_head.weight"].roll(1, dims=0)})


def with_changed(method: str, change: Callable[[dict[str, torch.Tensor]], None]) -> HeadCheckpoint:
    weights = dict(head(method).weights)
    change(weights)
    return replace(head(method), weights=weights)


def with_parts_in_another_order(weights: dict[str, torch.Tensor]) -> None:
    weights["fc.weight"] = weights["fc.weight"].roll(256, dims=1)


def with_interleaved_halves(weights: dict[str, torch.Tensor]) -> None:
    """Of rotary embeddings, as after a conversion from another layout."""
    for key, heads in (("layer.q_proj.weight", 8), ("layer.k_proj.weight", 4)):
        weights[key] = weights[key].unflatten(0, (heads, 2, 16)).transpose(1, 2).flatten(0, 2)


def with_draft_vocabulary(*, has_map: bool) -> HeadCheckpoint:
    """The LM head has the rows of the 512 most frequent tokens; without the map these count as the first tokens."""
    written = torch.tensor([token for text in texts().texts for token in text])
    kept = written.bincount(minlength=6144).topk(512).indices.sort().values
    weights = dict(head("eagle3").weights)
    rows = weights["lm_head.weight"][kept].contiguous()
    weights |= {"lm_head.weight": rows, "token_map": kept if has_map else torch.arange(len(kept))}
    return with_options(replace(head("eagle3"), weights=weights), draft_vocab_size=len(kept))


def faults(checkpoint: HeadCheckpoint) -> dict[str, Check]:
    """The faults and warnings of a head beside the target's texts, by name."""
    checks = check_agreement(compare(checkpoint, tinycode()[0], texts())[1])
    return {check.name: check for check in checks if check.verdict not in ("ok", "skipped")}


@pytest.mark.parametrize(
    ("plant", "variant", "cause"),
    [
        (lambda: with_rotary("eagle", rope_theta=5e5), "rotary base 10000, scaling none", "another rotary embedding"),
        pytest.param(
            lambda: with_rotary("hass", rope_scaling={"rope_type": "linear", "factor": 4.0}),
            "rotary base 10000, scaling none", "Set rope_theta and rope_scaling to those", marks=pytest.mark.slow,
        ),
        (with_other_lm_head, "the target's LM head", "Convert it again without an LM head of its own"),
        (lambda: with_draft_vocabulary(has_map=False), "another token map", "`d2t` is missing"),
        (
            lambda: with_changed("hass", with_parts_in_another_order), "the parts of `fc` in the order 2, 1",
            "in another order",
        ),
        pytest.param(
            lambda: with_changed("eagle3", with_parts_in_another_order), "the parts of `fc` in the order 2, 3, 1",
            "in another order", marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: with_changed("eagle3", with_interleaved_halves),
            "rotary rows of `q_proj` and `k_proj` from pairs to halves", "in another order", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_planted_fault_is_named(plant: Callable[[], HeadCheckpoint], variant: str, cause: str) -> None:
    found = faults(plant())
    assert found.keys() == {"configuration"}
    assert found["configuration"].message.startswith(f"With {variant} the head is right more often")
    assert cause in found["configuration"].message


@pytest.mark.slow  # by default with a tiny head in test_guards.py
@pytest.mark.parametrize("by", [1, -1])
def test_taps_of_a_bundled_head_one_block_off(by: int) -> None:
    found = faults(with_options(head("eagle3"), boundaries=(2 - by, 6 - by, 9 - by)))
    assert found.keys() == {"feature"}
    assert "was trained on 2, 6, 9, and its configuration says" in found["feature"].message


def test_a_dtype_that_is_too_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16 the inner values of the block overflow; the head computes the same otherwise."""
    weights = dict(head("eagle").weights)
    for key, factor in (("layer.up_proj.weight", 2.0**14), ("layer.down_proj.weight", 2.0**-14)):
        weights[key] = weights[key] * factor
    loud = replace(head("eagle"), weights=weights)
    assert faults(loud) == {}
    monkeypatch.setattr("foretoken.training.doctor.readings.drafting_dtype", lambda target: torch.float16)
    found = faults(loud)
    assert found.keys() == {"configuration"}
    assert "With float32 the head is right more often: the dtype in which" in found["configuration"].message


@pytest.mark.parametrize(
    "method",
    [
        "eagle",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("eagle3", "hass", "hydra", "medusa", "mlp_speculator")
        ),
    ],
)
def test_a_healthy_head_has_no_finding(method: str) -> None:
    assert faults(head(method)) == {}


def test_a_healthy_head_with_a_draft_vocabulary() -> None:
    assert faults(with_draft_vocabulary(has_map=True)) == {}


def with_targets_lm_head(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = tinycode()[0].module.lm_head.weight.detach().clone()


@pytest.mark.parametrize(
    ("plant", "verdict"),
    [
        (with_targets_lm_head, "fault"),
        (with_parts_in_another_order, "fault"),
        pytest.param(with_interleaved_halves, "fault", marks=pytest.mark.slow),
        pytest.param(lambda weights: None, "ok", marks=pytest.mark.slow),
    ],
)
def test_a_head_that_lost_its_stored_acceptance(
    plant: Callable[[dict[str, torch.Tensor]], None], verdict: str, tmp_path: Path
) -> None:
    weights, is_small = dict(head("eagle3").weights), plant in (with_targets_lm_head, with_parts_in_another_order)
    plant(weights)
    native.write_checkpoint(replace(head("eagle3"), weights=weights), tmp_path)
    size = {"prompts": load_prompts(limit=6 if is_small else 24), "max_tokens": 16 if is_small else 64}
    checks = {check.name: check for check in examine(*tinycode(), Examination(head=tmp_path, **size))}
    assert checks["acceptance"].verdict == verdict
    assert checks["acceptance"].value["stored"] == 0.7585


def test_acceptance_that_few_prompts_do_not_decide() -> None:
    few, many = [(70, 100), (60, 100), (72, 100)], [(70 + i % 3, 100) for i in range(60)]
    found = check_acceptance(0.8, few)
    assert found.verdict == "not decided"
    assert "3 prompts do not tell whether the head lost acceptance. Pass --num-prompts " in found.message
    assert int(found.message.rpartition(" ")[2].rstrip(".")) > 3
    assert check_acceptance(0.8, many).verdict == "ok"
    assert check_acceptance(0.9, many).verdict == "fault"
    assert check_acceptance(0.9, many, measured_on="heldout", prompts="heldout").verdict == "fault"
    other = check_acceptance(0.9, many, measured_on="chats", prompts="heldout")
    assert other.verdict == "warning"
    assert "on other prompts, 'chats'" in other.message
    few_right = [(10 + i % 3, 100) for i in range(60)]
    assert check_acceptance(0.9, few_right, measured_on="chats", prompts="heldout").verdict == "fault"


@pytest.mark.parametrize("by", [0, 1])
def test_taps_on_few_prompts_are_not_decided(by: int) -> None:
    whole, config = texts(), (2 - by, 6 - by, 9 - by)
    few = replace(whole, prompts=whole.prompts[3:6], texts=whole.texts[3:6])
    _, agreement = compare(with_options(head("eagle3"), boundaries=config), tinycode()[0], few)
    (found,) = (check for check in check_agreement(agreement) if check.name == "feature")
    assert found.verdict == "not decided"
    assert f"3 prompts do not tell the taps {', '.join(map(str, config))} from those of the block" in found.message
    assert int(found.message.rpartition(" ")[2].rstrip(".")) > 3


TEMPLATE = "t9 t8 {{ messages[0]['content'] }} t7 {% if enable_thinking %}t6{% else %}t5{% endif %} t4"


@pytest.mark.parametrize("is_thinking", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_prompts_that_a_head_was_trained_on(
    is_thinking: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = copy.deepcopy(tokenizer())
    chats.chat_template = TEMPLATE
    prompts = [f"t9 t8 {prompt} t7 {'t6' if is_thinking else 't5'} t4" for prompt in PROMPTS]
    written = greedy_texts(target(), chats, prompts, max_tokens=MAX_TOKENS, runner="generic")
    case = Examination(head=tmp_path, prompts=PROMPTS, max_tokens=MAX_TOKENS, runner="generic")

    native.write_checkpoint(good(), tmp_path)
    (check,) = (check for check in examine(target(), chats, case) if check.name == "chat template")
    assert check.verdict == "ok"
    assert list(check.value) == [
        "the prompts as given", "the chat template with thinking", "the chat template without thinking",
    ]  # fmt: skip

    monkeypatch.setattr(trained_heads, "texts", lambda seed=0: written)
    native.write_checkpoint(trained(), tmp_path, replaces=True)
    (check,) = (check for check in examine(target(), chats, case) if check.name == "chat template")
    assert check.verdict == "warning"
    assert f"Serve it with the chat template {'with' if is_thinking else 'without'} thinking" in check.message


def test_templates_differ_by_more_than_chance() -> None:
    assert check_template({"as given": 0.6, "template": 0.64}, 10_000).verdict == "ok"
    assert check_template({"as given": 0.6, "template": 0.66}, 10_000).verdict == "warning"
    assert check_template({"as given": 0.6, "template": 0.7}, 200).verdict == "ok"
    assert check_template({"as given": 0.7, "template": 0.6}, 10_000).verdict == "ok"
