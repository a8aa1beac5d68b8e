"""A caller's own model: served over its weights, left as it was, and usable at the same time."""

import copy
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers as hf
from model_files import message_of
from tiny_models import ARCHITECTURES, random_model, tiny_config, tiny_model
from torch import Tensor, nn

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ModelError
from foretoken.core.token_tree import TokenTree
from foretoken.models.loading import load_model, wrap_model
from foretoken.runner.decoders import DECODERS
from foretoken.runner.runner import Runner

PROMPT, GREEDY = [5, 9, 3], SamplingParams(temperature=0.0, max_tokens=6)
# Rotary and learned positions, tied weights, fused weights, windows, experts, sinks.
OF_EACH_KIND = ("llama", "llama_tied", "gpt2", "phi3", "gemma3", "mixtral", "gpt_oss")


def generated(module: Any) -> list[int]:
    """What transformers itself makes of the model."""
    ids = torch.tensor([PROMPT])
    output = module.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)
    result: list[int] = output[0].tolist()
    return result


def ours(module: Any, **options: Any) -> list[int]:
    """What the engine makes of it, drafting trees."""
    llm = LLM(module, speculative_config={"method": "ngram"}, **options)
    output = llm.generate([PROMPT, [7, 8]], GREEDY)[0].outputs[0]
    return [*PROMPT, *output.token_ids]


def state_of(module: Any) -> dict[str, Any]:
    """Everything that wrapping might change, by identity where an object must stay itself."""
    return {
        "modules": {name: (id(part), type(part), part.training) for name, part in module.named_modules()},
        "tensors": {
            name: (id(part), part.data_ptr(), part.requires_grad)
            for name, part in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
        },
        "hooks": {
            name: [id(hook) for hooks in (part._forward_hooks, part._forward_pre_hooks) for hook in hooks.values()]
            for name, part in module.named_modules()
        },
        "attributes": {name: sorted(vars(part)) for name, part in module.named_modules()},
        "config": (id(module.config), module.config.to_dict(), module.config._attn_implementation),
        "generation": (id(module.generation_config), module.generation_config.to_dict()),
    }


@pytest.mark.parametrize(
    "architecture",
    [each if each in OF_EACH_KIND else pytest.param(each, marks=pytest.mark.slow) for each in ARCHITECTURES],
)
def test_the_callers_model_stays_as_it_was(architecture: str) -> None:
    module = tiny_model(architecture, attn_implementation="sdpa" if architecture == "llama" else "eager").train()
    before, weights = state_of(module), copy.deepcopy(module.state_dict())
    ours(module)
    assert state_of(module) == before
    assert all(torch.equal(weights[key], value) for key, value in module.state_dict().items())


@pytest.mark.parametrize("runner", ["lean-native", "lean-stock", "generic"])
def test_both_give_the_same_text_in_turns(runner: str) -> None:
    module = tiny_model("llama")
    alone = generated(module)
    assert ours(module, runner=runner) == alone
    assert generated(module) == alone
    assert ours(module, runner=runner) == alone


def test_both_may_run_at_the_same_time() -> None:
    module = tiny_model("gpt2")
    expected, llm = generated(module), LLM(module, runner="generic")
    failures: list[BaseException] = []
    found: list[list[int]] = []

    def call() -> None:
        try:
            found.extend(generated(module) for _ in range(5))
        except BaseException as err:  # noqa: BLE001 - told by the other thread
            failures.append(err)

    other = threading.Thread(target=call)
    other.start()
    texts = [llm.generate(PROMPT, GREEDY)[0] for _ in range(5)]
    other.join()
    assert not failures
    assert found == [expected] * 5
    assert [[*PROMPT, *text.outputs[0].token_ids] for text in texts] == [expected] * 5


@pytest.mark.parametrize("architecture", ["llama", "llama_tied"])
def test_no_weight_is_in_memory_twice(architecture: str) -> None:
    module = tiny_model(architecture)
    model = wrap_model(module, name="mine")
    mine = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        assert parameter.data_ptr() == mine[name].data_ptr()
    copied: Any = model.module
    is_tied = copied.lm_head.weight is copied.get_input_embeddings().weight
    assert is_tied == (architecture == "llama_tied")


@pytest.mark.parametrize("runner", ["generic", "lean-native"])
def test_weights_changed_in_place_are_seen(runner: str) -> None:
    module = tiny_model("llama")
    made = Runner(wrap_model(module, name="mine"), num_slots=1, runner=runner)
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight.mul_(0.5)
    logits = made.verify([0], [0], TokenTree.roots([5])).logits[0]
    with torch.inference_mode():
        theirs = module(torch.tensor([[5]])).logits[0, 0]
    torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)


def test_a_write_while_weights_are_taken_in_is_not_lost() -> None:
    """Another thread's, between the copies that a decoder makes and the next pass."""
    module = tiny_model("llama", dtype=torch.float64)
    made, make = Runner(wrap_model(module, name="mine"), num_slots=1, runner="lean-stock"), DECODERS["lean-stock"]

    def write() -> None:
        with torch.no_grad():
            module.model.layers[1].mlp.up_proj.weight.mul_(0.5)

    def made_meanwhile(*arguments: Any) -> Any:
        decoder = make(*arguments)
        write()
        return decoder

    write()
    with mock.patch.dict(DECODERS, {"lean-stock": made_meanwhile}):
        assert made.follow_weights()
    assert made.follow_weights()
    assert not made.follow_weights()


def test_a_model_that_moves_on_leaves_the_target_behind() -> None:
    """`model.half()` replaces weights: the target keeps those that it was made of."""
    module = tiny_model("gpt2")
    llm = LLM(module, runner="generic")
    before = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    module.to(torch.bfloat16)
    assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == before


class GraphCapture:
    """A hook with state, such as people use to look into a model."""

    def __init__(self) -> None:
        self.calls = 0
        self.lock = threading.Lock()  # cannot be copied

    def hook(self, *event: Any) -> None:
        with self.lock:
            self.calls += 1


def test_hooks_stay_where_they_are_and_are_called() -> None:
    module, capture = tiny_model("llama"), GraphCapture()
    module.model.layers[0].register_forward_hook(capture.hook)
    before = state_of(module)["hooks"]
    expected = generated(module)
    counted = capture.calls
    assert ours(module, runner="generic") == expected
    assert capture.calls > counted > 0
    assert state_of(module)["hooks"] == before


@pytest.mark.parametrize("place", ["model", "projection", "norm"])
def test_hooks_of_accelerate(place: str) -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Doubled(hooks.ModelHook):  # type: ignore[misc]
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 2 if isinstance(output, Tensor) else output

    module = tiny_model("llama")
    parts = {
        "model": module,
        "projection": module.model.layers[0].mlp.up_proj,
        "norm": module.model.layers[0].input_layernorm,
    }
    hooks.add_hook_to_module(parts[place], Doubled())
    before, expected = state_of(module), generated(module)
    assert ours(module) == expected  # a model with hooks is left to the generic runner
    assert state_of(module) == before


OLD_NAME = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj"], r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(tiny_model("llama"), settings).eval()


@OLD_NAME
@pytest.mark.parametrize("runner", ["auto", "generic"])
def test_adapters_of_peft_are_served(runner: str) -> None:
    module = adapted()
    expected = generated(module)
    assert expected != generated(tiny_model("llama")), "the adapter matters"
    assert ours(module, runner=runner) == expected
    assert generated(module) == expected


@OLD_NAME
def test_adapters_that_are_merged_count_once() -> None:
    """Merging writes into weights that the target shares."""
    module = adapted()
    expected, llm = generated(module), LLM(module)
    for change in (module.merge_adapter, module.unmerge_adapter):
        change()
        assert [*PROMPT, *llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids] == expected == generated(module)


@OLD_NAME
def test_learned_prompts_are_refused() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(ModelError, match=r"PeftModelForCausalLM learns prompts, which come before the tokens"):
        LLM(peft.get_peft_model(tiny_model("llama"), settings))


def test_a_compiled_model_is_served() -> None:
    module = tiny_model("llama")
    assert ours(torch.compile(module)) == generated(module)


def refused(model: Any, **options: Any) -> str:
    message = message_of(lambda: LLM(model, **options))
    assert len(message) < 400, "a module's repr is hundreds of lines"
    return message


def test_what_is_no_causal_lm() -> None:
    config = tiny_config("llama")
    assert "LlamaModel has no LM head. Expected a causal LM" in refused(hf.AutoModel.from_config(config))
    assert "a Linear is no transformers model" in refused(nn.Linear(2, 2))
    assert "a Wrapper is no transformers model" in refused(type("Wrapper", (nn.Module,), {})())


def test_weights_that_are_not_there() -> None:
    with torch.device("meta"):
        module = hf.AutoModelForCausalLM.from_config(tiny_config("llama"))
    assert "on the device 'meta': they were never loaded" in refused(module)
    part = tiny_model("llama")
    part.model.layers[1].to("meta")  # as offloading leaves it
    assert "some weights of LlamaForCausalLM are on the device 'meta'" in refused(part)


def test_what_cannot_be_copied() -> None:
    module = tiny_model("llama")
    module.model.lock = threading.Lock()
    assert "LlamaForCausalLM holds something that cannot be copied (TypeError)" in refused(module)
    assert generated(module)


@pytest.mark.parametrize("how", ["module", "loaded"])
def test_a_model_in_memory_has_the_dtype_and_device_that_it_has(how: str) -> None:
    module = tiny_model("llama", dtype=torch.bfloat16)
    model = module if how == "module" else wrap_model(module, name="mine")
    message = refused(model, dtype="float32")
    assert "dtype 'float32' was asked for, but " in message
    assert "is in memory as bfloat16. Expected 'auto' or 'bfloat16'." in message
    assert "device 'cpu:1' was asked for, but" in refused(model, device="cpu:1")
    assert "does not exist" in refused(model, dtype="bfloat61")
    assert all("cannot be used" in refused(model, device=device) for device in ("cud", "meta"))
    assert LLM(model, dtype="bfloat16", device="cpu").target.model.dtype == torch.bfloat16


def test_paths_are_names(directory: Path) -> None:
    assert load_model(directory).name == str(directory)
    assert LLM(directory).target.model.name == str(directory)


def test_a_model_of_ours_says_whose_it_is(directory: Path) -> None:
    """Called by somebody else it would have to attend to a cache that is not there."""
    model = load_model(directory)
    with pytest.raises(ModelError, match=r"belongs to a foretoken runner .*\.set_attn_implementation\('sdpa'\)"):
        model.module(torch.tensor([[5]]))


@pytest.mark.parametrize("eos", ["2", 2.0, True, -1, [2, [3]], [2, "3"], {"id": 2}], ids=str)
def test_end_tokens_that_are_no_tokens(eos: Any) -> None:
    module = tiny_model("llama")
    module.generation_config.eos_token_id = eos
    assert "eos_token_id of 'LlamaForCausalLM' is " in refused(module)


def test_end_tokens_past_a_cut_vocabulary_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    module = random_model(tiny_config("llama"))
    module.generation_config.eos_token_id = [2, 50256, 2, 67]
    assert wrap_model(module, name="cut").eos_ids == (2,)
    assert "cut: end-of-sequence tokens [50256, 67] are not in its vocabulary of 67" in caplog.text
