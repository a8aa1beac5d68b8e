"""Drafting with the target's own first blocks: what a pass through some blocks says, and what is drafted from it."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafters.drafting_contexts import attached
from pairwise import slow_products
from tiny_models import ARCHITECTURES, tiny_model
from torch import nn

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError, ForetokenError, PassError
from foretoken.core.passes import Pass
from foretoken.drafters.early_exit import Options, create
from foretoken.models.generic import find_blocks
from foretoken.models.loading import wrap_model
from foretoken.runner.decoders import DECODERS
from foretoken.runner.runner import Runner
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.trees.dynamic import begin_expansion

TEXTS = [[3, 41, 5, 9, 26, 53, 58, 9], [7, 9, 3]]
ON_CPUS = [name for name in DECODERS if name != "lean-graphs"]


def cut(module: nn.Module, num_layers: int) -> nn.Module:
    """A copy without the blocks past the first ones."""
    copy = deepcopy(module)
    for each in copy.modules():
        if isinstance(each, nn.ModuleList) and len(each) == copy.config.num_hidden_layers:
            del each[num_layers:]
    copy.config.num_hidden_layers = num_layers
    if getattr(copy.config, "layer_types", None):
        copy.config.layer_types = copy.config.layer_types[:num_layers]
    return copy


def logits(module: nn.Module, decoder: str, num_layers: int | None) -> torch.Tensor:
    runner = Runner(wrap_model(module, name="tiny"), num_slots=2, context_len=32, max_nodes=4, runner=decoder)
    work = Pass.of_chains(TEXTS, slots=[0, 1], prefix_lens=[0, 0])
    output = runner.run(replace(work, logit_rows=torch.arange(work.num_tokens), num_layers=num_layers))
    assert output.logits is not None
    return output.logits


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("decoder", ON_CPUS)
def test_a_pass_through_the_first_blocks(decoder: str, num_layers: int) -> None:
    module = tiny_model("llama")
    got, expected = logits(module, decoder, num_layers), logits(cut(module, num_layers), decoder, None)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got, logits(module, decoder, None), atol=0.1)
    torch.testing.assert_close(logits(module, decoder, 3), logits(module, decoder, None), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in ("gpt_oss", "deepseek_v3")])
def test_transformers_models_end_early(architecture: str) -> None:
    module = tiny_model(architecture)
    got, expected = logits(module, "generic", 2), logits(cut(module, 2), "generic", None)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("decoder", ON_CPUS)
def test_more_blocks_than_there_are(decoder: str) -> None:
    with pytest.raises(PassError, match="goes through 4 blocks, the target has 3"):
        logits(tiny_model("llama"), decoder, 4)
    with pytest.raises(ValueError, match="Expected one at least"):
        replace(Pass.of_chains(TEXTS, slots=[0, 1], prefix_lens=[0, 0]), num_layers=0)


def with_idle_last_block() -> nn.Module:
    """A model whose last block adds nothing: its first two already say what it will."""
    module = tiny_model("llama")
    last: Any = find_blocks(module, 3)[-1]
    nn.init.zeros_(last.self_attn.o_proj.weight)
    nn.init.zeros_(last.mlp.down_proj.weight)
    return module


@pytest.mark.parametrize(("tree", "runner", "seed"), slow_products(["chain", "tree", "dynamic"], ON_CPUS, [None, 4]))
def test_drafts_of_a_target_that_gains_nothing_behind_the_exit(tree: str, runner: str, seed: int | None) -> None:
    """Every draft is accepted whole; a dynamic tree may lack the path where probabilities lie close together."""
    config = {"method": "early_exit", "exit_layer": 2, "tree": tree, "num_speculative_tokens": 3}
    llm = LLM(with_idle_last_block(), speculative_config=config, runner=runner, max_num_seqs=2)
    params = SamplingParams(temperature=0.0 if seed is None else 0.8, seed=seed, max_tokens=16, ignore_eos=True)
    for output in llm.generate(TEXTS, params):
        assert output.metrics.num_emitted == 16
        assert output.metrics.steps in ((4, 5) if tree == "dynamic" else (4,))


GREEDY = SamplingRequest(params=SamplingParams(temperature=0.0), seed=0)


@pytest.mark.parametrize("top_k", [2, 4, 10])
def test_dynamic_trees_feed_no_more_nodes_than_the_cache_has_room_for(top_k: int) -> None:
    """Expanded nodes lie where those of a verified tree will, and may be more than these."""
    made: Any = create(
        Options(method="early_exit", tree="dynamic", num_speculative_tokens=16, max_nodes=20, tree_top_k=top_k)
    )
    assert made.nodes_by_depth[-1] == 20
    draws = DraftDraws.build(SamplingBatch.build([GREEDY], 60), [False], torch.tensor([3]))
    assert 20 - top_k <= begin_expansion(made._shapes[-1], torch.tensor([3]), draws).num_fed < 20


@pytest.mark.parametrize(("exit_layer", "num_layers"), [(3, 3), (4, 3), (None, 1)], ids=["all", "more", "a single one"])
def test_no_block_is_left_out(exit_layer: int | None, num_layers: int) -> None:
    config = {"method": "early_exit", "exit_layer": exit_layer}
    with pytest.raises(ConfigError, match=rf"has {num_layers} blocks. Expected fewer than {num_layers}\."):
        LLM(tiny_model("llama", num_hidden_layers=num_layers), speculative_config=config)


def test_a_third_of_the_blocks() -> None:
    drafter = create(Options(method="early_exit"))
    runner = Runner(wrap_model(tiny_model("llama", num_hidden_layers=7), name="seven"), num_slots=1, context_len=32)
    attached(drafter, model=runner.model, target_runner=runner)
    assert drafter._num_layers == 2


def test_strangers_cannot_run_the_target() -> None:
    stranger = create(Options(method="early_exit", exit_layer=1, num_speculative_tokens=2))
    with pytest.raises(ConfigError, match="runs the target itself, and it is not trusted"):
        LLM(tiny_model("llama"), drafter=lambda: stranger)


@pytest.mark.parametrize("value", [0, -1, True, 2.0, "2"])
def test_exit_layer_is_a_number(value: Any) -> None:
    with pytest.raises(ForetokenError, match="exit_layer"):
        LLM(tiny_model("llama"), speculative_config={"method": "early_exit", "exit_layer": value})
