"""The lean decoders against the generic one: every option of the blocks they know, and what they leave to others."""

import copy
import gc
import re
import weakref
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from decoder.lean_models import (
    LEAN,
    LLAMA_LIKE,
    VARIANTS,
    assert_exact,
    assert_like_generic,
    assert_near_truth,
    assert_undisturbed,
    runner,
)
from pairwise import slow_products
from tiny_models import CONTEXT_LEN, LEAN_ARCHITECTURES, random_model, tiny_config, tiny_model
from torch import nn

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.blocks import Matrix
from foretoken.decoder.fused_linear import fuse
from foretoken.engine.acceptor import greatest_on_host
from foretoken.models.generic import run_plain
from foretoken.models.loading import wrap_model
from foretoken.runner import decoders
from foretoken.runner.runner import Runner

pytestmark = pytest.mark.native

NEW = [name for name in LEAN_ARCHITECTURES if name in VARIANTS and name not in LLAMA_LIKE]
DTYPES = [torch.float32, torch.bfloat16]
DECODERS = (*LEAN, "generic")
MIXTURES = ("mixtral", "qwen3_moe", "qwen2_moe")


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_generic_runners(variant: str) -> None:
    assert_like_generic(VARIANTS[variant], LEAN)


@pytest.mark.parametrize(
    ("variant", "dtype", "kind"),
    [
        *slow_products(LLAMA_LIKE, [torch.bfloat16, torch.float32], LEAN),
        # Not of experts: one token that goes to another one outweighs all roundings.
        *slow_products([name for name in NEW if name not in MIXTURES], [torch.bfloat16], LEAN, each=1),
    ],
)
def test_no_further_from_the_truth_than_the_generic_runner(variant: str, dtype: torch.dtype, kind: str) -> None:
    assert_near_truth(VARIANTS[variant], kind, dtype)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *product((*LLAMA_LIKE, "three in a group", "head_dim 80"), DTYPES),
        *slow_products([*NEW, "olmo2 odd sizes", "qwen3_moe many experts", "starcoder2 gelu"], DTYPES, each=1),
    ],
)
def test_native_arithmetic_does_not_depend_on_company(variant: str, dtype: torch.dtype) -> None:
    assert_exact(runner(VARIANTS[variant], "lean-native", dtype, max_nodes=40))


@pytest.mark.parametrize(("architecture", "kind"), slow_products(NEW, LEAN, each=1))
def test_greedy_text_with_trees_is_the_generic_runners(architecture: str, kind: str) -> None:
    module, prompts = tiny_model(architecture), [[7, 8, 9] * 3, [40, 3, 12, 9, 61, 17]]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    plain = LLM(module, runner="generic").generate(prompts, params)
    config = {"method": "ngram", "tree": "tree", "prompt_lookup_min": 1}
    ours = LLM(module, runner=kind, speculative_config=config, max_num_seqs=2).generate(prompts, params)
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in plain]


@pytest.mark.parametrize(
    ("dtype", "is_borrowed"),
    slow_products([torch.float32, torch.float64, torch.bfloat16], [False, True], each=1),
)
def test_decoders_of_one_model_do_not_disturb_each_other(dtype: torch.dtype, is_borrowed: bool) -> None:
    """In any order; in float64 nothing is packed, and the kernels do not run."""
    kinds = [kind for kind in DECODERS if dtype != torch.float64 or kind != "lean-native"]
    assert_undisturbed("qwen2", dtype, permutations(kinds), is_borrowed=is_borrowed)


@pytest.mark.parametrize(
    ("architecture", "dtype", "place"), slow_products(LEAN_ARCHITECTURES, DTYPES, range(3), each=1)
)
def test_decoders_of_every_architecture_do_not_disturb_each_other(
    architecture: str, dtype: torch.dtype, place: int
) -> None:
    """One of three orders, half of them in each dtype.

    Of both halves each decoder is the first once, and the next after each other one, as all run twice.
    """
    by_sign = {torch.float32: (0, 3, 4), torch.bfloat16: (1, 2, 5)}  # even and odd permutations
    order = list(permutations(DECODERS))[by_sign[dtype][place]]
    assert_undisturbed(architecture, dtype, [order], is_borrowed=False)


@pytest.mark.parametrize("kind", LEAN)
def test_positions_of_padding_do_no_harm(kind: str) -> None:
    """Nobody checks the depths of padding nodes, and a kernel looks positions up in a table."""
    made = runner(VARIANTS["llama"], kind, max_nodes=12)
    made.prefill(0, [5, 9, 3], 0)
    made.prefill(1, [5, 9], 0)
    tree = TokenTree.from_rows([TreeRow([5, 6, 7, 8], [-1, 0, 0, 2]), TreeRow([5], [-1])])
    expected = made.verify([0, 1], [3, 2], tree).logits
    depths = tree.depths.clone()
    depths[1, 1:] = -(10**9)
    logits = made.verify([0, 1], [3, 2], replace(tree, depths=depths)).logits
    assert torch.equal(logits, expected)


def test_decoders_share_what_they_pack_and_give_it_back() -> None:
    model = wrap_model(tiny_model("llama"), name="tiny")
    attention: Any = model.backbone.layers[0].self_attn
    parts = [Matrix(weight=part.weight) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    first, second = (Runner(model, num_slots=1, runner="lean-stock") for _ in range(2))
    whole = weakref.ref(fuse(*parts))
    assert whole() is fuse(*parts)
    del first
    gc.collect()
    assert whole() is not None
    del second
    gc.collect()
    assert whole() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_that_is_written_to_is_fused_anew(dtype: torch.dtype) -> None:
    layers = [nn.Linear(8, rows, bias=False, dtype=dtype) for rows in (4, 6)]
    parts = [Matrix(weight=layer.weight) for layer in layers]
    x = torch.linspace(-1, 1, 8, dtype=dtype).unsqueeze(0)
    first = fuse(*parts)
    assert fuse(*parts) is first
    with torch.no_grad():
        layers[0].weight.mul_(-0.5)
    second = fuse(*parts)
    assert second is not first
    torch.testing.assert_close(second(x), torch.cat([layer(x) for layer in layers], dim=1))


@pytest.mark.parametrize("is_borrowed", [True, False])
def test_joined_weights_are_in_memory_once_in_a_model_of_ours(is_borrowed: bool) -> None:
    """In float64 nothing is packed: joined projections are the memory of the originals, unless these are a caller's."""
    module = tiny_model("llama", dtype=torch.float64)
    before = [parameter.data_ptr() for parameter in module.parameters()]
    model = replace(wrap_model(module, name="tiny"), is_borrowed=is_borrowed)
    made = Runner(model, num_slots=1, runner="lean-stock")
    layers: Any = [layer.self_attn for layer in model.backbone.layers]
    for layer in layers:
        parts = [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
        stores = {part.untyped_storage().data_ptr() for part in parts}
        assert len(stores) == (3 if is_borrowed else 1)
    assert [parameter.data_ptr() for parameter in module.parameters()] == before, "the caller's are left alone"
    assert made.name == "lean-stock"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, dtype) for kind in LEAN for dtype in (torch.float32, torch.bfloat16)),
        ("lean-stock", torch.float64),
    ],
)
def test_a_model_that_runs_lean_can_still_be_saved(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model: Any = replace(wrap_model(tiny_model("qwen2", dtype=dtype), name="tiny"), is_borrowed=False)
    before = {key: value.clone() for key, value in model.module.state_dict().items()}
    made = Runner(model, num_slots=1, runner=kind)
    model.module.save_pretrained(tmp_path)
    assert made.name == kind
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    assert before.keys() == again.keys()
    assert all(torch.equal(value, again[key]) for key, value in before.items())


def test_native_kernels_read_weights_in_place() -> None:
    module = tiny_model("llama")
    made = Runner(wrap_model(module, name="tiny"), num_slots=1, runner="lean-native")
    tree = TokenTree.roots([5])
    before = made.verify([0], [0], tree).logits
    with torch.no_grad():
        module.model.layers[1].mlp.down_proj.weight.zero_()
    after = made.verify([0], [0], tree).logits
    assert not torch.equal(before, after)
    torch.testing.assert_close(after[0], run_plain(module, torch.tensor([[5]])).logits[0, 0], rtol=1e-4, atol=1e-4)


def test_weights_that_are_fused_already_are_joined_where_they_are() -> None:
    """In float64 nothing is packed: Phi-3's projections are the memory of the stock decoder's."""
    model = replace(wrap_model(tiny_model("phi3", dtype=torch.float64), name="tiny"), is_borrowed=False)
    made: Any = Runner(model, num_slots=1, runner="lean-stock")
    layer: Any = model.backbone.layers[1]  # type: ignore[index]
    fused = made.decoder._blocks._layers[1]
    assert fused.query_key_value._weight.data_ptr() == layer.self_attn.qkv_proj.weight.data_ptr()
    assert fused.mlp._up._weight.data_ptr() == layer.mlp.gate_up_proj.weight.data_ptr()


def test_longrope_never_leaves_its_short_frequencies() -> None:
    """They are the same at every length only up to the original one, where the context ends."""
    made = runner(VARIANTS["phi3 longrope"], "lean-native")
    assert made.context_len == made.last_position + 1 == 64 < CONTEXT_LEN


class _OfALibrary(torch.Tensor):
    """Stands for weights of torchao: a linear layer of torch, and a tensor that holds integers."""


class TestWhatIsLeftToTheGenericRunner:
    """`auto` falls back and says so once; `lean` is refused with a sentence."""

    @staticmethod
    def foreign() -> dict[str, nn.Module]:
        relu = random_model(tiny_config("llama", hidden_act="relu"))
        mixed, hooked, adapted = tiny_model("llama"), tiny_model("llama"), tiny_model("llama")
        mixed.model.norm.to(torch.bfloat16)
        hooked.model.layers[0].mlp.up_proj.register_forward_hook(lambda *event: event[2] * 2)
        layer = adapted.model.layers[2].self_attn
        layer.q_proj = nn.Sequential(layer.q_proj, nn.Identity())
        router, experts, fused = tiny_model("qwen3_moe"), tiny_model("mixtral"), tiny_model("phi3")
        router.model.layers[1].mlp.gate.register_forward_hook(lambda *event: event[2])
        moe = experts.model.layers[0].mlp
        moe.experts = type("Own", (type(moe.experts),), {"__module__": "elsewhere"})(experts.config)
        fused.model.layers[2].mlp.gate_up_proj = nn.Sequential(fused.model.layers[2].mlp.gate_up_proj)
        in_integers = tiny_model("llama")
        up = in_integers.model.layers[1].mlp.up_proj
        up.weight = nn.Parameter(torch.Tensor._make_subclass(_OfALibrary, up.weight.detach()), requires_grad=False)
        return {
            "GPT2LMHeadModel is not among the architectures it knows": tiny_model("gpt2"),
            "with activation 'relu' is not among what it knows": relu,
            "its weights differ in dtype: torch.bfloat16, torch.float32": mixed,
            "up_proj (Linear) is not a plain linear layer": hooked,
            "q_proj (Sequential) is not a plain linear layer": adapted,
            "up_proj.weight is a _OfALibrary, not a plain tensor": in_integers,
            "model.layers.1.mlp.gate has a forward hook": router,
            "mlp.experts (Own) is not a plain linear layer": experts,
            "gate_up_proj (Sequential) is not a plain linear layer": fused,
            "with bidirectional attention": tiny_model("gemma3", use_bidirectional_attention=True),
        }

    @pytest.mark.parametrize("reason", list(foreign()))
    def test_it_is_named(self, reason: str, caplog: pytest.LogCaptureFixture) -> None:
        model = wrap_model(self.foreign()[reason], name=reason)
        with pytest.raises(ModelError, match=r"runner 'lean' cannot run '.*'\. lean-native, lean-stock: ") as caught:
            Runner(model, num_slots=1, runner="lean")
        assert reason in str(caught.value)
        if "(Own)" in reason or "bidirectional" in reason:  # without weights, and not causal: no runner computes them
            return
        for _ in range(2):
            assert Runner(model, num_slots=1).name == "generic"
        assert caplog.text.count("runs on the generic runner. lean-native, lean-stock: ") == 1
        assert reason in caplog.text

    def test_a_hooked_layer_is_heard(self) -> None:
        module = self.foreign()["up_proj (Linear) is not a plain linear layer"]
        made = Runner(wrap_model(module, name="hooked"), num_slots=1)
        theirs = run_plain(module, torch.tensor([[5]])).logits[0, 0]
        torch.testing.assert_close(made.verify([0], [0], TokenTree.roots([5])).logits[0], theirs)

    def test_subclasses_are_strangers(self) -> None:
        class LlamaForCausalLM(hf.LlamaForCausalLM):
            pass

        module = LlamaForCausalLM(tiny_config("llama"))
        assert Runner(wrap_model(module, name="subclass"), num_slots=1).name == "generic"

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
    def test_native_kernels_know_two_dtypes(self, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
        model = wrap_model(tiny_model("llama", dtype=dtype), name="tiny")
        with pytest.raises(ModelError, match="runs float32 and bfloat16 on CPUs, not torch"):
            Runner(model, num_slots=1, runner="lean-native")
        assert Runner(model, num_slots=1, runner="lean").name == "lean-stock"
        assert not caplog.text, "where they are not meant to serve nobody need be told"

    def test_a_lean_decoder_that_fails_its_self_test_is_dropped(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        check = decoders.check_tree_attention

        def strict(model: Any, decoder: Any, *arguments: Any, **options: Any) -> None:
            check(model, decoder, *arguments, **options)
            if decoder.name != "generic":
                raise ModelError("wrong logits.")

        monkeypatch.setattr(decoders, "check_tree_attention", strict)
        model = wrap_model(tiny_model("llama"), name="suspect")
        assert Runner(model, num_slots=1).name == "generic"
        # The stock one is tried too where it measured faster than the generic one.
        assert re.search(
            r"suspect runs on the generic runner\. lean-native(, lean-stock)?: wrong logits\.", caplog.text
        )

    def test_no_such_runner(self) -> None:
        with pytest.raises(ConfigError, match=r"runner 'leen' does not exist\. .*'lean'"):
            Runner(wrap_model(tiny_model("llama"), name="tiny"), num_slots=1, runner="leen")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_exact_decoder_is_the_default_on_every_processor(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever matrix units the processor says that it has: the stock kernels are taken when asked for."""
    capabilities = {**torch.cpu.get_capabilities(), "amx_bf16": True, "amx_tile": True}
    model = wrap_model(tiny_model("llama", dtype=dtype), name="tiny")
    made = Runner(model, num_slots=1)  # compiled for the processor that there is
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert Runner(model, num_slots=1).name == made.name == "lean-native"
    assert made.is_exact


def test_only_the_native_decoder_is_exact() -> None:
    model = wrap_model(tiny_model("llama"), name="tiny")
    exact = {kind: Runner(model, num_slots=1, runner=kind).is_exact for kind in DECODERS}
    assert exact == {"lean-native": True, "lean-stock": False, "generic": False}


def test_deep_copies_are_independent() -> None:
    """A noisy copy of a model whose original runs on native kernels must not write into the original."""
    module = tiny_model("llama")
    made = Runner(wrap_model(module, name="tiny"), num_slots=1, runner="lean-native")
    before = made.verify([0], [0], TokenTree.roots([5])).logits
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(made.verify([0], [0], TokenTree.roots([5])).logits, before)


@pytest.mark.parametrize("vocab_size", [5, 16, 61, 6144])
def test_the_greatest_logit_of_each_row(vocab_size: int) -> None:
    """Lowest id first among equals, as numpy has it; none in a row that holds no number, or an infinite one."""
    config = tiny_config("llama", vocab_size=vocab_size, tie_word_embeddings=False)
    module = random_model(config)
    with torch.no_grad():
        module.lm_head.weight.copy_(module.lm_head.weight.sign())  # many ties
    target = Runner(wrap_model(module, name="tiny"), num_slots=2, runner="lean-native")
    rows = TokenTree.from_rows([TreeRow(tokens=[1, 2, 3], parents=[-1, 0, 0]), TreeRow(tokens=[4], parents=[-1])])
    output = target.verify([0, 1], [0, 0], rows)
    assert output.logits is not None
    assert output.chosen is not None
    assert output.chosen.tolist() == output.logits.numpy().argmax(1).tolist() == greatest_on_host(output.logits)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_rows_without_a_greatest_logit(odd: float) -> None:
    """A weight that is no number makes the row useless; rows that do not see it stay as they are."""
    config = tiny_config("llama", vocab_size=61, tie_word_embeddings=False)
    module = random_model(config)
    target = Runner(wrap_model(module, name="tiny"), num_slots=2, runner="lean-native")
    with torch.no_grad():
        module.model.embed_tokens.weight[7] = odd
    output = target.verify([0, 1], [0, 0], TokenTree.roots([7, 8]))
    assert output.logits is not None
    assert output.chosen is not None
    assert output.chosen.tolist() == greatest_on_host(output.logits)
    assert output.chosen[0] == -1
    assert output.chosen[1] >= 0
