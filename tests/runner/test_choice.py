"""Which decoder is used: by what its passes cost at the widths that are run, and never against a promise."""

import gc
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError, ModelError, PassError
from foretoken.decoder import fused_linear
from foretoken.decoder.library import native_library
from foretoken.models.loading import load_model, wrap_model
from foretoken.runner import costs, decoders
from foretoken.runner.costs import CostCurve, PassCosts, keep_points, measure_costs
from foretoken.runner.runner import PassWidths, Runner, likely_decoder, ranked


def priced(step_ms: float, tree_ms: float, prompt_ms: float, *, slot_ms: float = 0.0) -> PassCosts:
    """Passes of one token, of 64 nodes and of 512 prompt tokens; slot_ms: of one sequence more."""
    return PassCosts(
        tree=CostCurve((1, 16, 64), (step_ms / 1e3, (step_ms + (tree_ms - step_ms) / 4) / 1e3, tree_ms / 1e3)),
        step=CostCurve((1, 4), (step_ms / 1e3, (step_ms + 3 * slot_ms) / 1e3)),
        prompt=CostCurve((1, 512), (step_ms / 1e3, prompt_ms / 1e3)),
    )


# Measured on a Xeon with AMX, 24 layers of 1024 in bfloat16, before the native kernels used its matrix units; the
# generic one is an invention.
XEON = {
    "lean-native": priced(35, 421, 2600, slot_ms=6),
    "lean-stock": priced(48, 75, 300, slot_ms=1),
    "generic": priced(120, 180, 700, slot_ms=3),
}
SMALL = {
    "lean-native": priced(1.4, 10, 60, slot_ms=0.2),
    "lean-stock": priced(10, 12, 40),
    "generic": priced(20, 25, 50),
}
INEXACT = {"lean-native": priced(30, 40, 50), "lean-stock": priced(3, 4, 5), "generic": priced(1, 2, 3)}  # is cheaper


def unasked(name: str) -> PassCosts:
    raise AssertionError(f"nothing has to be known of {name}")


def loaded(architecture: str = "llama", **options: Any) -> Any:
    return wrap_model(tiny_model(architecture, **options), name="tiny")


def runner(model: Any, kind: str, table: Callable[[str], PassCosts], **options: Any) -> Runner:
    return Runner(model, **{"num_slots": 1, "max_nodes": 1, "context_len": 64, **options}, runner=kind, costs=table)


@pytest.mark.parametrize(
    ("table", "num_slots", "max_nodes", "expected"),
    [
        (XEON, 1, 1, "lean-native"),  # one token after another
        (XEON, 16, 1, "lean-stock"),  # many at once
        (XEON, 1, 4, "lean-native"),  # short chains
        (XEON, 1, 64, "lean-stock"),  # wide trees
        (XEON, 8, 16, "lean-stock"),
        (SMALL, 1, 1, "lean-native"),
        (SMALL, 1, 16, "lean-native"),
        (SMALL, 1, 64, "lean-native"),
        (SMALL, 8, 64, "lean-stock"),
    ],
)
def test_the_fastest_at_the_widths_serves(
    table: dict[str, PassCosts], num_slots: int, max_nodes: int, expected: str
) -> None:
    made = runner(loaded(), "fastest", table.__getitem__, num_slots=num_slots, max_nodes=max_nodes)
    assert made.name == expected
    assert made.choice.startswith(f"{expected} is used: passes of {num_slots} / ")


def test_long_prompts_count() -> None:
    """Decoding alone speaks for the first, whose prompts take a hundred times as long."""
    table = {"lean-native": priced(10, 10, 30_000), "lean-stock": priced(20, 20, 300), "generic": priced(30, 30, 300)}
    assert runner(loaded(), "fastest", table.__getitem__).name == "lean-stock"
    table["lean-native"] = priced(10, 10, 600)
    assert runner(loaded(), "fastest", table.__getitem__).name == "lean-native"


def test_what_passes_are_weighed_by() -> None:
    """Eight sequences: a step of 8 tokens, a verification of 128, and three prompt tokens each."""
    curves = PassCosts(
        tree=CostCurve((1, 128), (1.0, 128.0)),
        step=CostCurve((1, 4), (1.0, 7.0)),
        prompt=CostCurve((1, 256), (1.0, 64)),
    )
    assert PassWidths(8, 1, 256).passes(curves) == [(8, 15.0), (256, 64.0)]
    assert PassWidths(8, 1, 256).seconds(curves) == pytest.approx(15 + 8 * 0.25)
    assert PassWidths(8, 16, 256).passes(curves) == [(8, 15.0), (128, 128.0 + 15 - 8), (256, 64.0)]
    assert PassWidths(8, 16, 256).seconds(curves) == pytest.approx(15 + 135 + 3 * 8 * 0.25)


@pytest.mark.parametrize("kind", ["auto", "lean", "lean-native"])
@pytest.mark.parametrize("max_nodes", [1, 64])
def test_the_promise_of_exactness_is_not_for_sale(kind: str, max_nodes: int) -> None:
    made = runner(loaded(), kind, unasked, max_nodes=max_nodes)
    assert made.is_exact
    assert runner(loaded(), "fastest", INEXACT.__getitem__, max_nodes=max_nodes).name == "generic"


@pytest.mark.parametrize("table", [INEXACT, XEON], ids=["generic", "stock"])
def test_where_no_exact_one_fits_costs_decide(table: dict[str, PassCosts]) -> None:
    expected = "generic" if table is INEXACT else "lean-stock"
    model = loaded(dtype=torch.float64)
    assert runner(model, "auto", table.__getitem__).name == expected
    assert runner(model, "lean", unasked).name == "lean-stock"


@pytest.mark.parametrize(
    ("architecture", "kind", "expected", "why"),
    [
        ("gpt2", "auto", "generic", "no other one fits the model"),
        ("gpt2", "fastest", "generic", "no other one fits the model"),
        ("llama", "lean-stock", "lean-stock", "it was asked for"),
        ("llama", "auto", "lean-native", "no other one gives a token the same bits in every pass"),
    ],
)
def test_nothing_is_measured_without_a_choice(architecture: str, kind: str, expected: str, why: str) -> None:
    made = runner(loaded(architecture), kind, unasked)
    assert (made.name, made.choice) == (expected, f"{expected} is used: {why}")


@pytest.mark.parametrize(("kind", "is_said"), [("fastest", True), ("auto", True), ("generic", False)])
def test_recurrent_layers_on_the_generic_runner_name_a_faster_dtype(
    kind: str, is_said: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and not where it was asked for by name."""
    monkeypatch.setattr("foretoken.runner.runner._said", set())
    model = loaded("lfm2", dtype=torch.float64)
    for _ in range(2):
        assert runner(model, kind, INEXACT.__getitem__).name == "generic"
    said = "on the generic runner in float64. Pass dtype='bfloat16' or 'float32' for lean-native."
    assert caplog.text.count(said) == is_said


def test_an_activation_that_transformers_does_not_read() -> None:
    """LFM2 takes silu, whatever its configuration says; the self-test would refuse another activation."""
    assert runner(loaded("lfm2", hidden_act="gelu", dtype=torch.float32), "lean-native", unasked).name == "lean-native"


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "lfm2"])
def test_the_dtype_of_models_from_files(architecture: str, tmp_path: Path) -> None:
    """On a CPU float32 with or without recurrent layers, whatever the files have, unless weights are in integers."""
    tiny_model(architecture, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path, device="cpu").dtype is torch.float32
    assert load_model(tmp_path, device="cpu", dtype="bfloat16").dtype is torch.bfloat16


def test_noise_does_not_decide() -> None:
    """Within a twentieth the first one serves, which is exact where one is; and the order of the rest is by cost."""
    widths = PassWidths(1, 1)
    table = {"lean-native": priced(10, 10, 10), "lean-stock": priced(9.7, 9.7, 9.7), "generic": priced(9.6, 9.6, 9.6)}
    assert [name for name, _ in ranked(table, widths)] == ["lean-native", "generic", "lean-stock"]
    table["generic"] = priced(9.0, 9.0, 9.0)
    assert [name for name, _ in ranked(table, widths)] == ["generic", "lean-stock", "lean-native"]
    equal = dict.fromkeys(table, priced(1, 1, 1))
    assert [name for name, _ in ranked(equal, widths)] == list(table)


@pytest.mark.parametrize("failing", ["measuring", "serving"])
def test_a_decoder_that_fails_its_proof_is_passed_over(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = decoders.check_tree_attention

    def strict(model: Any, decoder: Any, *arguments: Any, **options: Any) -> None:
        check(model, decoder, *arguments, **options)
        if decoder.name == "lean-stock":
            raise ModelError("wrong logits.")

    def table(name: str) -> PassCosts:
        if failing == "measuring" and name == "lean-stock":
            raise ModelError("wrong logits.")
        return XEON[name]

    monkeypatch.setattr(decoders, "check_tree_attention", strict)
    made = runner(loaded(), "fastest", table, max_nodes=64)
    assert made.name == "generic", "native takes longer still for wide trees"
    with pytest.raises(ModelError, match=r"^runner 'lean-stock' cannot run 'tiny'\. lean-stock: wrong logits\.$"):
        runner(loaded(), "lean-stock", unasked)


def test_the_generic_runner_s_own_error_is_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any, decoder: Any, *arguments: Any, **options: Any) -> None:
        raise ModelError(f"{decoder.name} is wrong.")

    monkeypatch.setattr(decoders, "check_tree_attention", refuse)
    for kind in ("auto", "fastest", "generic"):
        with pytest.raises(ModelError, match=r"^generic is wrong\.$"):
            runner(loaded(), kind, INEXACT.__getitem__)
    with pytest.raises(
        ModelError, match=r"'lean' cannot run 'tiny'\. lean-native: lean-native is wrong\. lean-stock: "
    ):
        runner(loaded(), "lean", unasked)


def test_what_cannot_be_timed_comes_last(caplog: pytest.LogCaptureFixture) -> None:
    def table(name: str) -> PassCosts:
        if name != "generic":
            raise PassError("there is no memory.")
        return XEON[name]

    def nothing(name: str) -> PassCosts:
        raise torch.OutOfMemoryError

    assert runner(loaded(), "fastest", table).name == "generic"
    assert "passes of the lean-native runner cannot be timed: there is no memory." in caplog.text
    assert runner(loaded(), "fastest", nothing).name == "lean-native", "the order of preference is left"


def test_the_log_says_which_and_why(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.runner.runner._said", set())
    with caplog.at_level(logging.INFO, "foretoken"):
        for _ in range(2):
            runner(loaded(), "fastest", SMALL.__getitem__, max_nodes=16)
    assert caplog.messages == [
        "tiny: lean-native is used: passes of 1 / 16 / 64 tokens take 1.4 / 3.5 / 8.6 ms "
        "(lean-stock 10 / 10 / 14, generic 20 / 21 / 24)"
    ]


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"runner 'fastst' does not exist\. Did you mean 'fastest'\?"):
        runner(loaded(), "fastst", unasked)
    with pytest.raises(ConfigError, match="runner 'quick' does not exist"):
        likely_decoder(loaded(), "quick", PassWidths(1), costs=unasked)
    assert likely_decoder(loaded(), "fastest", PassWidths(1, 64), costs=XEON.__getitem__) == "lean-stock"
    assert likely_decoder(loaded(), "auto", PassWidths(1, 64), costs=XEON.__getitem__) == "lean-native"

    def without_native(name: str) -> PassCosts:
        if name == "lean-native":
            raise ModelError("no compiler.")
        return XEON[name]

    assert likely_decoder(loaded(), "auto", PassWidths(1, 64), costs=without_native) == "lean-stock"
    with pytest.raises(ModelError, match=r"'lean-native' cannot run 'tiny'\. lean-native: no compiler\."):
        likely_decoder(loaded(), "lean-native", PassWidths(1), costs=without_native)


class TestCostsThatAreKept:
    """The file in the cache directory decides, as long as it can be true."""

    @pytest.fixture(autouse=True)
    def measured(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
        """Decoders that were measured; each seems to cost nearly nothing, the generic one least."""
        native_library()  # not to be compiled anew for an empty cache
        names: list[str] = []

        def instantly(model: Any, decoder: str) -> PassCosts:
            names.append(decoder)
            return INEXACT[decoder]

        monkeypatch.setattr(costs, "measure_costs", instantly)
        monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
        return names

    @staticmethod
    def chosen() -> str:
        return Runner(loaded(), num_slots=1, max_nodes=64, context_len=64, runner="fastest").name

    @staticmethod
    def keep(table: dict[str, PassCosts]) -> None:
        for name, known in table.items():
            points = {
                "tree": [(w, known.tree(w)) for w in (1, 16, 64)],
                "step": [(w, known.step(w)) for w in (1, 4)],
                "prompt": [(w, known.prompt(w)) for w in (1, 512)],
            }
            keep_points(costs._key(loaded(), name), points)

    def test_they_are_believed(self, measured: list[str]) -> None:
        self.keep(XEON)
        assert self.chosen() == "lean-stock"
        assert not measured

    def test_what_is_missing_is_measured(self, measured: list[str]) -> None:
        self.keep({name: known for name, known in XEON.items() if name != "generic"})
        assert self.chosen() == self.chosen() == "generic"
        assert measured == ["generic"]


def test_the_losers_leave_nothing_behind() -> None:
    """They are really measured, and one of them packs the weights; the choice is made by other costs."""
    model = loaded()

    gc.collect()
    before = len(fused_linear._fused)
    packed = runner(model, "lean-stock", unasked)
    assert len(fused_linear._fused) > before
    del packed
    assert len(fused_linear._fused) == before

    def measured(name: str) -> PassCosts:
        measure_costs(model, name, limit_s=0.0)
        return SMALL[name]

    made = runner(model, "fastest", measured)
    assert made.name == "lean-native"
    assert len(fused_linear._fused) == before


@pytest.mark.parametrize("method", [None, "ngram"])
def test_what_was_really_measured_and_chosen_writes_the_same(
    method: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    native_library()
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    config = None if method is None else {"method": method, "tree": "tree", "prompt_lookup_min": 1}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompt = [5, 6, 7, 5, 6]
    fast = LLM(tiny_model("llama"), speculative_config=config, runner="fastest")
    assert fast.target.name in ("lean-native", "lean-stock", "generic")
    assert " is used: passes of 8 / " in fast.target.choice
    module = tiny_model("llama")
    ids = module.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=24, min_new_tokens=24, eos_token_id=None
    )
    assert fast.generate([prompt], params)[0].outputs[0].token_ids == ids[0, len(prompt) :].tolist()
    kept = json.loads((tmp_path / "foretoken-costs.json").read_text())
    assert len(kept["curves"]) == 3
