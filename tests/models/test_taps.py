"""Features at every boundary of every architecture, in prompts and at tree nodes, against ordinary forwards."""

import random

import pytest
import torch
from plain_model import FLOAT32_TOLERANCE, PlainModel, relative_error
from tiny_models import tiny_model
from torch import Tensor, nn
from tree_decoding import CASES, by_path, decode, random_tokens, tiny_runner

from foretoken.core.errors import ModelError
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner

pytestmark = pytest.mark.native

NUM_LAYERS = 3
TAPS = (*range(NUM_LAYERS + 1), "final")


def expected_features(plain: PlainModel, tokens: list[int]) -> Tensor:
    """(T, F, D) features in the order of `TAPS`, put together from what the model reports and one hook."""
    states = plain.hidden_states(tokens)
    assert len(states) == NUM_LAYERS + 1
    # The model's last hidden state is after the final norm, so the last block's output has to be caught before it.
    return torch.stack([*states[:NUM_LAYERS], plain.final_norm_input(tokens), states[-1]], dim=1)


def logits_of(runner: Runner, final: Tensor) -> Tensor:
    """What the LM head makes of the tap `final`, with the scales and caps that the forward of some models adds."""
    module, config = runner.model.module, runner.model.config
    logits = module.get_output_embeddings()(final)
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)


@pytest.mark.parametrize(("architecture", "runner_name"), CASES)
def test_features_of_a_prompt(architecture: str, runner_name: str) -> None:
    runner, plain = tiny_runner(architecture, taps=TAPS, runner=runner_name), PlainModel(tiny_model(architecture))
    tokens = random_tokens(random.Random(0), 11)
    parts = [runner.prefill(0, tokens[start : start + 4], start) for start in range(0, len(tokens), 4)]
    ours = torch.cat([part for part in parts if part is not None])
    assert ours.shape == (len(tokens), len(TAPS), 32)
    assert relative_error(ours, expected_features(plain, tokens)) < FLOAT32_TOLERANCE


@pytest.mark.parametrize(("architecture", "runner_name"), CASES)
def test_features_and_logits_at_tree_nodes(architecture: str, runner_name: str) -> None:
    runner, plain = tiny_runner(architecture, taps=TAPS, runner=runner_name), PlainModel(tiny_model(architecture))
    rounds = decode(runner, seed=1, rounds=2)
    for done, row, theirs in by_path(lambda texts: [expected_features(plain, text) for text in texts], rounds):
        assert relative_error(done.features(row), theirs) < FLOAT32_TOLERANCE
    for done in rounds:
        features = done.output.features
        assert features is not None
        with torch.inference_mode():
            again = logits_of(runner, features[:, TAPS.index("final")])
        assert relative_error(again, done.output.logits) < FLOAT32_TOLERANCE


def test_order_and_number_are_as_asked() -> None:
    tokens = [5, 6, 7]
    every = tiny_runner("qwen3", taps=TAPS).prefill(0, tokens, 0)
    some = tiny_runner("qwen3", taps=("final", 2, 0)).prefill(0, tokens, 0)
    assert every is not None
    assert some is not None
    assert torch.equal(some, every[:, [TAPS.index("final"), 2, 0]])
    assert tiny_runner("qwen3").prefill(0, tokens, 0) is None


def test_features_keep_the_models_dtype() -> None:
    features = tiny_runner("llama", taps=(1,), dtype=torch.bfloat16).prefill(0, [5, 6], 0)
    assert features is not None
    assert features.dtype == torch.bfloat16


def test_two_runners_on_one_model_do_not_mix() -> None:
    """A second runner's hooks run in the first one's passes, and must not change what it gives."""
    model = wrap_model(tiny_model("llama"), name="tiny")
    first = Runner(model, num_slots=1, taps=(1, "final"))
    before = first.prefill(0, [5, 6, 7], 0)
    second = Runner(model, num_slots=1, taps=(2,))
    after, other = first.prefill(0, [5, 6, 7], 0), second.prefill(0, [5, 6, 7], 0)
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)
    assert other is not None
    assert other.shape[1] == 1


@pytest.mark.parametrize("tap", [-1, NUM_LAYERS + 1, "finale"])
def test_taps_that_do_not_exist(tap: int | str) -> None:
    with pytest.raises(ModelError, match=rf"tap {tap!r} does not exist: .* 3 blocks\. Expected 0\.\.3 or 'final'\."):
        tiny_runner("llama", taps=(0, tap))


def test_no_norm_after_the_last_block() -> None:
    model = wrap_model(tiny_model("opt", num_hidden_layers=2, do_layer_norm_before=False), name="opt")
    Runner(model, num_slots=1, taps=(0, 1, 2))
    with pytest.raises(ModelError, match=r"OPTForCausalLM has no norm after its last block\. The tap 'final'"):
        Runner(model, num_slots=1, taps=("final",))


def test_blocks_that_cannot_be_told_apart() -> None:
    module = tiny_model("llama")
    module.adapters = nn.ModuleList(nn.Linear(2, 2) for _ in range(NUM_LAYERS))
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has 2 lists of 3 blocks\. Expected exactly one\."):
        Runner(wrap_model(module, name="tiny"), num_slots=1, taps=(1,), runner="generic")


def test_as_many_experts_as_blocks_are_no_second_list() -> None:
    module = tiny_model("mixtral", num_local_experts=NUM_LAYERS)
    Runner(wrap_model(module, name="tiny"), num_slots=1, taps=(1, "final"))


def test_a_tap_that_is_not_what_the_model_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof at load can fail: hooks one block off are noticed."""
    find = "foretoken.models.generic.find_blocks"
    monkeypatch.setattr(find, lambda model, num_layers: [*model.model.layers[1:], model.model.layers[0]])
    with pytest.raises(ModelError, match="tap 1 of LlamaForCausalLM is not the hidden state that the model reports"):
        tiny_runner("llama", taps=(1,), runner="generic")
