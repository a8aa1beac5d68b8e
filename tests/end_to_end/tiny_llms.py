"""Tiny targets, related draft models, a tokenizer that splits characters, and every drafter under a short name.

Drafts must get accepted for a test of commits to mean anything, so draft models are the target with noise in its
weights, and the oracle is told what plain decoding wrote.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from math import log
from typing import Any
from unittest import mock

import numpy as np
import torch
from drafters.adversarial import BEHAVIOURS
from end_to_end.stop_rules import stop_rule
from end_to_end.tiny_heads import HEADS, depth, head
from made_once import new_folder
from tiny_models import EOS_ID, VOCAB_SIZE, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foretoken import LLM
from foretoken.core.token_ids import tokenizer_sha
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import DraftContext, Drafter, TargetHandle
from foretoken.drafters.draft_model import DraftModelDrafter, Options, drafter_of
from foretoken.drafters.partial_reads import WeightOptions
from foretoken.drafters.rest import write_datastore
from foretoken.models.loading import wrap_model
from foretoken.trees.stopping import PathFloors, StopRule

MEDUSA_CHOICES = [[0], [1], [0, 0], [0, 1], [2], [0, 0, 0], [0, 0, 0, 0], [1, 0]]
GAPPED_CHOICES = [[1], [3], [1, 0], [1, 2], [1, 2, 1]]  # ranks that a search over measured acceptance may skip
WIDTHS = {"widths": [3, 2, 1]}
# Every runner in a dtype in which no two passes round differently enough to swap tokens. Where arithmetic depends on
# the width of a pass, that takes float64; the native kernels' does not: the coarsest dtype is their hardest test.
RUNNERS = {"generic": torch.float64, "lean-stock": torch.float64, "lean-native": torch.bfloat16}

# Letters, pieces of longer words, and single bytes of characters that take two, three and four of them.
_PIECES = [" ", *"abcdefghijklmnopqrstuvwxyz", "th", "he", "ing", "\n", "ab", *"ABCDEFGHIJKL", *"0123456789."]
SPECIALS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
_BYTES = sorted({byte for character in "éß€😀" for byte in character.encode()})
PIECES: list[str | bytes] = [  # all tokens, special ones by name
    *SPECIALS.values(), *(piece.encode() for piece in _PIECES), *(bytes([byte]) for byte in _BYTES),
]  # fmt: skip
# Ids of the targets' tokens that another tokenizer has, in the order of its own: all but <pad>, "th", "a" and "7".
OTHER_ORDER = [(7 * i + 3) % 67 for i in range(67) if (7 * i + 3) % 67 not in (0, 4, 30, 54)]


@cache
def target(architecture: str = "llama", dtype: torch.dtype = torch.float64) -> Any:
    """The target of most tests."""
    return tiny_model(architecture, dtype=dtype)


@cache
def noisy(architecture: str = "llama", noise: float = 0.02, dtype: torch.dtype = torch.float64) -> Any:
    """A draft model related to the target: its weights with noise; 0 gives a copy."""
    module = copy.deepcopy(target(architecture, dtype))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


@cache
def noisy_directory(architecture: str = "llama", dtype: torch.dtype = torch.float64) -> str:
    """The files of a draft model related to the target."""
    directory = new_folder("noisy")
    noisy(architecture, dtype=dtype).save_pretrained(directory)
    return str(directory)


@cache
def tokenizer() -> Any:
    """A byte-level tokenizer of the tiny models' vocabulary; `</s>` is their end-of-sequence token."""
    return byte_level_tokenizer(PIECES)


def byte_level_tokenizer(pieces: Sequence[str | bytes]) -> Any:
    """A byte-level tokenizer that splits text into single bytes.

    Args:
        pieces: Tokens in the order of their ids: names of special tokens, and bytes.
    """
    shown = dict(zip(range(256), _byte_alphabet(), strict=True))
    names = [piece if isinstance(piece, str) else "".join(shown[byte] for byte in piece) for piece in pieces]
    inner = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    specials = {role: name for role, name in SPECIALS.items() if name in pieces}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **specials)


@cache
def other_tokenizer() -> Any:
    """A tokenizer that shares most of its tokens with that of the targets, under other ids, and has two more."""
    return byte_level_tokenizer([*(PIECES[token] for token in OTHER_ORDER), b"es", b"tion"])


def with_other_vocabulary(module: Any) -> Any:
    """A model with the rows of its embedding and LM head in the order of `other_tokenizer`, and two random ones."""
    module = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(2)
    for part in (module.get_input_embeddings(), module.get_output_embeddings()):
        new = 0.25 * torch.randn(2, part.weight.shape[1], generator=generator, dtype=torch.float64)
        part.weight = torch.nn.Parameter(torch.cat([part.weight[OTHER_ORDER], new.to(part.weight.dtype)]))
    module.config.vocab_size = module.get_output_embeddings().out_features = len(OTHER_ORDER) + 2
    return module


def _byte_alphabet() -> list[str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def draft_model(module: Any, *, tokenizer: Any = None, **options: Any) -> Callable[[], Drafter]:
    """Makes a draft-model drafter over a model in memory; without a tokenizer its vocabulary is the target's."""
    checked = Options(method="draft_model", **{"tree": "chain", **options})
    if tokenizer is not None:
        return lambda: drafter_of(checked, lambda target: wrap_model(module, name="draft"), lambda: tokenizer)
    return lambda: DraftModelDrafter(checked, lambda target: wrap_model(module, name="draft"))


class _Wrapped:
    """Another drafter with a change."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


class _DraftsSomeTokens(_Wrapped):
    """A draft model that drafts a quarter of its small vocabulary by default, where a decoder can."""

    def attach(self, target: TargetHandle) -> None:
        with mock.patch.object(WeightOptions, "large_vocabulary", 1):
            self._drafter.attach(target)


class EndsEarly(_Wrapped):
    """A drafter of chains that end by their path."""

    def propose(self, context: DraftContext) -> TokenTree:
        return self._drafter.propose(replace(context, floors=FLOORS))


FLOORS = PathFloors(1.0, [3.0, 2.5] * 8, [log(floor) for floor in (0.3, 0.1, 0.2, 0.05)] * 4)


def oracle(pattern: Sequence[int], tree: Any = "chain") -> Callable[[Any], dict[str, Any]]:
    """An oracle that is told the references."""
    return lambda references: {
        "speculative_config": {"method": "oracle", "references": references, "pattern": pattern, "tree": tree}
    }


def fixed(**arguments: Any) -> Callable[[Any], dict[str, Any]]:
    """Arguments of `LLM` that need no references."""
    return lambda references: arguments


def config(method: str, **keys: Any) -> Callable[[Any], dict[str, Any]]:
    """A `speculative_config`."""
    return fixed(speculative_config={"method": method, **keys})


def lookup(**keys: Any) -> dict[str, Any]:
    """The configuration of prompt lookup."""
    return {"method": "ngram", "prompt_lookup_min": 1, **keys}


def rest(**keys: Any) -> Callable[[Any], dict[str, Any]]:
    """Retrieval from a datastore of the references, without every fifth of them."""

    def arguments(references: Any) -> dict[str, Any]:
        known = [text for index, text in enumerate(references or [[5, 6, 7]]) if index % 5]
        return {"speculative_config": {"method": "rest", "datastore": datastore(tuple(map(tuple, known))), **keys}}

    return arguments


@cache
def datastore(texts: tuple[tuple[int, ...], ...]) -> str:
    """A directory with a datastore of some texts."""
    directory = new_folder("datastore")
    write_datastore(
        directory, np.array([*chain(*texts), EOS_ID], dtype=np.uint16), vocab_size=VOCAB_SIZE, eos_id=EOS_ID,
        tokenizer_sha=tokenizer_sha(tokenizer()), tokens_sha256="of the test",
    )  # fmt: skip
    return str(directory)


def merged(*parts: dict[str, Any] | str, architecture: str = "llama") -> Callable[[Any], dict[str, Any]]:
    """Several drafters in one tree: configurations, and names of heads."""

    def arguments(references: Any) -> dict[str, Any]:
        each = [
            part if isinstance(part, dict) else head(part, architecture)(references)["speculative_config"]
            for part in parts
        ]
        return {"speculative_config": {"drafters": each}}

    return arguments


def sampled_and_lookups(architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """Probes and guesses beside, and inside, a tree whose tokens are drawn from a draft model's distribution."""
    parts: list[dict[str, Any]] = [
        {"method": "lookahead", "num_speculative_tokens": 4, "lookahead_ngram": 4, "lookahead_window": 3},
        {"method": "draft_model", "tree": WIDTHS, "model": noisy_directory(architecture, dtype)},
        {"method": "recycling", "num_speculative_tokens": 4, "max_nodes": 16},
    ]
    return {"speculative_config": {"drafters": parts}}


def draft_and_lookups(architecture: str, dtype: torch.dtype) -> dict[str, Any]:
    """A draft model's drawn tokens with what lookups say, beside and below them."""
    model = {"method": "draft_model", "model": noisy_directory(architecture, dtype)}
    return {"speculative_config": {"drafters": [model, {"method": "suffix"}, {"method": "recycling"}]}}


def drafters(architecture: str = "llama", dtype: torch.dtype = torch.float64) -> dict[str, Callable[[Any], Any]]:
    """Every drafter and tree under a short name: references (prompt and plain output) to arguments of `LLM`."""

    def draft(noise: float = 0.02, **options: Any) -> Callable[[Any], dict[str, Any]]:
        made = draft_model(noisy(architecture, noise, dtype), **options)
        return fixed(drafter=made, trust_drafter=True)  # as the registry's, which has no models in memory

    def draft_some(**options: Any) -> Callable[[Any], dict[str, Any]]:
        model = draft_model(noisy(architecture, 0.02, dtype), **options)
        return fixed(drafter=lambda: _DraftsSomeTokens(model()), trust_drafter=True)

    def draft_ends(noise: float = 0.02, **options: Any) -> Callable[[Any], dict[str, Any]]:
        model = draft_model(noisy(architecture, noise, dtype), **options)
        return fixed(drafter=lambda: EndsEarly(model()), trust_drafter=True)

    def draft_other(match: str, **options: Any) -> Callable[[Any], dict[str, Any]]:
        module = with_other_vocabulary(noisy(architecture, 0.02, dtype))
        made = draft_model(module, tokenizer=other_tokenizer(), vocab_match=match, **options)
        return fixed(drafter=made, trust_drafter=True)

    return {
        "none": fixed(),
        "ngram": config("ngram", num_speculative_tokens=5, prompt_lookup_min=1),
        "ngram adaptive": config("ngram", prompt_lookup_min=1),
        "ngram tree": config("ngram", tree="tree", prompt_lookup_min=1, num_speculative_tokens=16),
        "ngram tree adaptive": config("ngram", tree="tree", prompt_lookup_min=1),
        "suffix": config("suffix", num_speculative_tokens=5),
        "suffix tree": config("suffix", tree="tree", num_speculative_tokens=16, suffix_decoding_max_spec_factor=4.0),
        "suffix tree adaptive": config("suffix", tree="tree"),
        "prediction": config("prediction", num_speculative_tokens=5),
        "prediction tree adaptive": config("prediction", tree="tree"),
        "rest": rest(num_speculative_tokens=5),
        "rest tree": rest(tree="tree", num_speculative_tokens=8, max_nodes=24),
        "two lookups": merged(lookup(tree="tree"), lookup(prompt_lookup_max=9)),
        "two lookups adaptive": merged(lookup(tree="tree"), lookup()),
        "lookup and head": merged(lookup(num_speculative_tokens=3), "medusa", architecture=architecture),
        "heads": merged("hydra++", "medusa", lookup(tree="tree"), architecture=architecture),
        "lookahead": config("lookahead", num_speculative_tokens=4, lookahead_window=4),
        "recycling": config("recycling", num_speculative_tokens=8, max_nodes=24),
        "lookahead and recycling adaptive": merged({"method": "lookahead"}, {"method": "recycling"}),
        "draft, suffix and recycling": lambda references: draft_and_lookups(architecture, dtype),
        "sampled draft and lookahead": lambda references: sampled_and_lookups(architecture, dtype),
        "draft": draft(num_speculative_tokens=4),
        "draft adaptive": draft(),
        "draft itself": draft(0.0, num_speculative_tokens=3),
        "draft tree": draft(tree="tree"),
        "draft itself tree": draft(0.0, tree="tree"),
        "draft choices": draft(tree=MEDUSA_CHOICES),
        "draft gapped choices": draft(0.0, tree=GAPPED_CHOICES),
        "draft widths": draft(tree=WIDTHS),
        "draft dynamic": draft(tree="dynamic", num_speculative_tokens=4, tree_top_k=4, max_nodes=12),
        "draft itself dynamic": draft(0.0, tree="dynamic", num_speculative_tokens=4, tree_top_k=3, max_nodes=9),
        "draft pruned": draft(num_speculative_tokens=6, pruning={"token_probability": 0.04}),
        "draft tree pruned": draft(tree="tree", pruning={"path_probability": 0.001, "entropy_weighted": 0.2}),
        "draft dynamic pruned": draft(
            tree="dynamic", num_speculative_tokens=4, tree_top_k=4, max_nodes=12, pruning={"token_probability": 0.03}
        ),
        "draft stopped": draft(num_speculative_tokens=6, stop=StopRule.of("confidence", 0.04)),
        "draft tree stopped": draft(tree=WIDTHS, stop=stop_rule("specdec_pp")),
        "draft as stored": draft(num_speculative_tokens=4, quantization="none"),  # else int8 where that can be
        "draft window": draft(num_speculative_tokens=4, draft_window_size=6, draft_sink_size=2),
        "draft itself window": draft(0.0, num_speculative_tokens=3, draft_window_size=40),
        "draft retrieval": draft(num_speculative_tokens=4, draft_window_size=6, draft_retrieval=True),
        "draft window tree": draft(tree="tree", draft_window_size=6),
        "draft intersection": draft_other("intersection", num_speculative_tokens=4),
        "draft intersection dynamic": draft_other(
            "auto", tree="dynamic", num_speculative_tokens=4, tree_top_k=4, max_nodes=12
        ),
        "draft text": draft_other("text", num_speculative_tokens=4),
        "draft some tokens": draft_some(num_speculative_tokens=4),
        "draft some tokens tree": draft_some(tree=WIDTHS),
        "draft ends early": draft_ends(),
        "draft itself ends early": draft_ends(0.0),
        "draft greedy": draft(num_speculative_tokens=4, draft_sample_method="greedy"),
        "early exit": config("early_exit", exit_layer=2, num_speculative_tokens=4),
        "early exit tree": config("early_exit", exit_layer=2, tree="tree"),
        "early exit dynamic": config(
            "early_exit", exit_layer=2, tree="dynamic", num_speculative_tokens=3, tree_top_k=4, max_nodes=12
        ),
        "early exit adaptive": config("early_exit"),
        "sparse kv": config("sparse_kv", kv_budget=12, num_speculative_tokens=4),
        "sparse kv by head": config("sparse_kv", kv_selection="snapkv", kv_budget=36, num_speculative_tokens=4),
        "sparse kv recent": config(
            "sparse_kv", kv_selection="streaming_llm", kv_budget=12, kv_sinks=2, num_speculative_tokens=4
        ),
        "sparse kv tree": config("sparse_kv", kv_budget=12, tree="tree"),
        "sparse kv dynamic": config(
            "sparse_kv", kv_budget=8, tree="dynamic", num_speculative_tokens=3, tree_top_k=4, max_nodes=12
        ),
        "sparse kv early exit": config("sparse_kv", kv_budget=12, exit_layer=2, num_speculative_tokens=4),
        "sparse kv guessed": config("sparse_kv", kv_budget=12, draft_with="ngram", num_speculative_tokens=9),
        "sparse kv early exit guessed": config(
            "sparse_kv", kv_budget=12, exit_layer=2, draft_with="ngram", num_speculative_tokens=6
        ),
        "sparse kv in int8": config("sparse_kv", kv_budget=12, quantization="auto", num_speculative_tokens=4),
        "sparse kv adaptive": config("sparse_kv"),
        "oracle [0]": oracle([0]),
        "oracle [2]": oracle([2]),
        "oracle [3, 0, 5]": oracle([3, 0, 5]),
        "oracle tree": oracle([3, 0, 5], "tree"),
        # Depths that are named do not follow the clock.
        **{name: head(name, architecture, num_speculative_tokens=depth(name)) for name in HEADS},
        **{f"{name} adaptive": head(name, architecture) for name in HEADS},
        **{
            f"{name} dynamic": head(
                name, architecture, tree="dynamic", tree_top_k=4, max_nodes=12, num_speculative_tokens=3
            )
            for name in ("medusa", "hydra", "mlp_speculator", "eagle", "eagle3", "falcon", "spire")
        },
        "hydra stopped": head("hydra", architecture, control="confidence", confidence_threshold=0.05),
        "hydra pruned": head("hydra", architecture, num_speculative_tokens=3, pruning={"entropy_weighted": 0.3}),
        "medusa dynamic pruned": head(
            "medusa", architecture, tree="dynamic", num_speculative_tokens=3, pruning={"path_probability": 0.05}
        ),
        "eagle pruned": head("eagle", architecture, tree=MEDUSA_CHOICES, pruning={"token_probability": 0.2}),
        "falcon pruned": head("falcon", architecture, tree=MEDUSA_CHOICES, pruning={"path_probability": 0.05}),
        "hydra dynamic adaptive": head("hydra", architecture, tree="dynamic"),
        "hydra++ as stored": head("hydra++", architecture, num_speculative_tokens=3, quantization="none"),
        **{
            f"{name}, some tokens": head(name, architecture, num_speculative_tokens=3, draft_vocab_size=24)
            for name in ("eagle", "falcon", "hydra++", "medusa")
        },
        "eagle as stored": head("eagle", architecture, num_speculative_tokens=3, quantization="none"),
        "medusa chain": head("medusa", architecture, tree="chain"),
        "medusa choices": head("medusa", architecture, tree=GAPPED_CHOICES),
        "medusa widths": head("medusa", architecture, tree=WIDTHS, draft_sample_method="greedy"),
        "hydra chain": head("hydra", architecture, tree="chain", num_speculative_tokens=3),
        "hydra++ window": head("hydra++", architecture, num_speculative_tokens=3, draft_window_size=6),
        "eagle window": head("eagle", architecture, num_speculative_tokens=3, draft_window_size=6, draft_sink_size=0),
        "eagle window dynamic": head(
            "eagle",
            architecture,
            tree="dynamic",
            tree_top_k=4,
            max_nodes=12,
            num_speculative_tokens=3,
            draft_window_size=8,
        ),
        "eagle3 retrieval": head(
            "eagle3", architecture, num_speculative_tokens=3, draft_window_size=6, draft_retrieval=True
        ),
        "hydra++ choices": head("hydra++", architecture, tree=MEDUSA_CHOICES),
        "hydra++ chain": head("hydra++", architecture, tree="chain"),
        "eagle choices": head("eagle", architecture, tree=MEDUSA_CHOICES),
        "eagle3 chain": head("eagle3", architecture, tree="chain", num_speculative_tokens=6),
        "spire choices": head("spire", architecture, tree=MEDUSA_CHOICES),
        "falcon choices": head("falcon", architecture, tree=MEDUSA_CHOICES),
        "falcon chain": head("falcon", architecture, tree="chain", num_speculative_tokens=5),
        "mlp_speculator widths": head("mlp_speculator", architecture, tree=WIDTHS),
        "mlp_speculator chain": head("mlp_speculator", architecture, tree="chain", num_speculative_tokens=2),
        **{f"random {name}": head(name, architecture, steps=0, num_speculative_tokens=depth(name)) for name in HEADS},
        **{name: config("drafters.adversarial", behaviour=name) for name in BEHAVIOURS},
        # Deep enough a shape that the 40 levels of "too_deep" fit the width and are cut by depth.
        "too_deep, 64 nodes": config("drafters.adversarial", behaviour="too_deep", num_speculative_tokens=63),
        "random wide": config("drafters.adversarial", behaviour="random", tree={"widths": [20, 2]}),
    }


def llm(arguments: dict[str, Any], *, module: Any = None, runner: str = "generic", **more: Any) -> LLM:
    """An `LLM` over the tiny target with its tokenizer, in the runner's dtype."""
    chosen = target("llama", RUNNERS[runner]) if module is None else module
    return LLM(chosen, tokenizer=tokenizer(), runner=runner, **arguments, **more)
