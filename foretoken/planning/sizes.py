"""The sizes of targets and drafters, from a model or its configuration alone; and the roofline: seconds of a pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from foretoken.core.errors import ConfigError, ModelError
from foretoken.decoder.quantized_modules import QuantizedEmbedding, QuantizedExperts, QuantizedLinear
from foretoken.models.config import check_architecture
from foretoken.models.loaded import DTYPES
from foretoken.models.loading import load_config
from foretoken.models.names import is_gguf
from foretoken.models.recurrent import RecurrentSizes, recurrent_sizes
from foretoken.models.stored.gguf_file import read_gguf
from foretoken.models.weight_files import meta_model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model that decide what a pass costs."""

    layers: int  # L
    hidden_size: int  # D
    heads: int  # H, query heads
    kv_heads: int  # Hk
    head_dim: int  # width of a head
    vocab_size: int  # V, logits of a token; 0 without an LM head
    weights: float  # weights that every pass reads: all but the experts and an embedding that only looks up rows
    experts: int = 0  # experts of a layer; 0 for a dense model
    experts_per_token: int = 0  # experts that a token uses
    expert_weights: float = 0.0  # weights of one expert, summed over the layers
    weight_bytes: float = 2.0  # bytes of a weight
    kv_bytes: float = 2.0  # bytes of an element of the KV cache
    recurrent: RecurrentSizes | None = None  # None: all layers have attention

    @property
    def attention_layers(self) -> int:
        """Layers with attention."""
        return self.layers if self.recurrent is None else self.recurrent.attention_layers

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent layers of one sequence, whatever its length: states, and windows of convolutions."""
        return 0 if self.recurrent is None else self.recurrent.state_bytes + self.recurrent.window_bytes

    @property
    def active_weights(self) -> float:
        """Weights that one token uses."""
        return self.weights + self.experts_per_token * self.expert_weights

    @property
    def weights_bytes(self) -> float:
        """Bytes of all weights that passes read."""
        return self.weight_bytes * (self.weights + self.experts * self.expert_weights)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of the keys and values of one position."""
        return 2 * self.attention_layers * self.kv_heads * self.head_dim * self.kv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device as the roofline sees it."""

    bytes_per_s: float  # memory bandwidth that passes reach
    flops_per_s: float  # arithmetic that passes reach, in the dtype of the weights
    memory_bytes: float  # memory for weights and KV cache


# For a number of a state and a token: its decay, and a product and a sum with the key (read), the key (add) and the
# query (read). Mamba2 does not read with the key, and has 5.
_STATE_OPERATIONS = 7
_LOGIT_READS = 3  # times that softmax and sampling go over float32 logits; a choice: two for softmax, one for the draw


def touched_experts(experts: int, experts_per_token: int, tokens: float) -> float:
    """Returns the expected number of experts that some token of a pass uses, if every expert is equally likely.

    Source: linearity of expectation; an expert stays idle with probability (1 - k / E) ** tokens.
    """
    return experts * (1 - (1 - experts_per_token / experts) ** tokens) if experts else 0.0


def pass_seconds(sizes: ModelSizes, machine: Machine, *, contexts: Sequence[float], width: float) -> float:
    """Returns the seconds of a pass by the roofline: weights, then KV cache and recurrent states, then logits.

    Each part takes the longer of its memory traffic and its arithmetic. A sequence reads its KV cache once for all of
    its tokens, and reads and writes its recurrent states once. A wide pass of a mixture of experts reads more experts.

    `contexts` are the committed tokens of each sequence, `width` the tokens of each sequence in the pass.

    Source: Williams et al. 2009 (roofline, doi 10.1145/1498765.1498785), applied to each part of a decoder.
    """
    tokens, committed = len(contexts) * width, sum(contexts)
    touched = touched_experts(sizes.experts, sizes.experts_per_token, tokens)
    weights = _part_seconds(
        machine,
        num_bytes=sizes.weight_bytes * (sizes.weights + touched * sizes.expert_weights),
        flops=2 * sizes.active_weights * tokens,
    )
    states = 0 if sizes.recurrent is None else sizes.recurrent.state_bytes / 4  # numbers in float32
    cache = _part_seconds(
        machine,
        num_bytes=sizes.kv_bytes_per_token * committed + 2 * sizes.state_bytes * len(contexts),
        flops=4 * sizes.attention_layers * sizes.heads * sizes.head_dim * width * (committed + tokens / 2)
        + _STATE_OPERATIONS * states * tokens,
    )
    logits = 4 * tokens * sizes.vocab_size * _LOGIT_READS / machine.bytes_per_s
    return weights + cache + logits


def _part_seconds(machine: Machine, *, num_bytes: float, flops: float) -> float:
    return max(num_bytes / machine.bytes_per_s, flops / machine.flops_per_s)


_EXPERTS = ".experts."  # part of the names of the weights of experts in transformers; shared experts have another name
# Sizes of drafters that do not exist yet. Choices: the sizes that their papers and trainers use most.
_DRAFT_MODEL_SHARE = 0.1  # of the target's weights and layers
_NUM_HEADS = 4  # Medusa and Hydra
_EAGLE3_VOCABULARY = 32_000
_SPIRE_LAYERS, _SPIRE_WINDOW = 2, 4 + 256  # the defaults of `foretoken.heads.spire`
_SPARSE_WINDOW = 512  # rows of a sequence; the second least budget of MagicDec (arXiv 2408.11049), less one


def described_sizes(name: str, dtype: str) -> tuple[ModelSizes, int]:
    """Returns the sizes of a model and its greatest context, from its configuration: no weights are read.

    Args:
        name: A directory with `config.json`, a hub id, or a GGUF file.
        dtype: Of weights and KV cache; "auto" for the configuration's. A GGUF file has its own types of weights.

    Raises:
        ModelError: If the configuration cannot be read, or its architecture cannot be built.
    """
    config = load_config(name)
    check_architecture(config, name)
    module = meta_model(config)
    if module is None:
        raise ModelError(f"a model cannot be built from the configuration of '{name}'. Expected a causal LM.")
    text = config.get_text_config()
    is_known = dtype in DTYPES
    if not is_known and dtype != "auto":
        raise ConfigError(f"dtype is '{dtype}'. Expected auto, {', '.join(DTYPES)}.")
    weights = DTYPES[dtype] if is_known else getattr(text, "dtype", None) or DTYPES["bfloat16"]
    sizes = sizes_of(module, text, weights.itemsize)
    if is_gguf(name):
        sizes = replace(sizes, weight_bytes=read_gguf(Path(name)).bytes_per_weight)
    return sizes, int(getattr(text, "max_position_embeddings", None) or 4096)


def sizes_of(module: Any, config: Any, itemsize: int) -> ModelSizes:
    """Returns the sizes of a model of transformers with a text configuration; its weights may be on "meta".

    `itemsize`: bytes of a weight, and of an element of the KV cache.
    """
    experts = next((n for key in _EXPERT_COUNTS if (n := getattr(config, key, None))), 0)
    tied = getattr(module, "all_tied_weights_keys", {})
    counts = {key: each.numel() for key, each in module.named_parameters() if key not in tied}
    counts |= {
        key: part.matrix.shape.numel() for key, part in module.named_modules() if isinstance(part, QuantizedLinear)
    }
    counts |= {
        f"{key}.": part.gate_up.shape.numel() + part.down.shape.numel()
        for key, part in module.named_modules()
        if isinstance(part, QuantizedExperts)
    }
    of_experts = sum(count for key, count in counts.items() if _EXPERTS in key) if experts else 0
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    is_rounded = isinstance(embedding, QuantizedEmbedding)  # and so not among the parameters
    is_tied = bool(tied) or head is None or is_rounded or head.weight is embedding.weight
    recurrent = recurrent_sizes(module, config, itemsize)
    heads = getattr(config, "num_attention_heads", None) or 0
    if not heads and recurrent is None:
        raise ModelError(f"'{config.model_type}' has no attention. Expected a model whose KV rows can be counted.")
    kv_heads, head_dim = getattr(config, "num_key_value_heads", None) or heads, getattr(config, "head_dim", None)
    rank = getattr(config, "kv_lora_rank", None)
    if rank:  # one compressed row instead of keys and values
        kv_heads, head_dim = 1, (rank + config.qk_rope_head_dim) / 2
    return ModelSizes(
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or (config.hidden_size // heads if heads else 0),
        vocab_size=config.vocab_size,
        weights=sum(counts.values()) - of_experts - (0 if is_tied else embedding.weight.numel()),
        experts=experts,
        experts_per_token=getattr(config, "num_experts_per_tok", 0) if experts else 0,
        expert_weights=of_experts / experts if experts else 0.0,
        weight_bytes=itemsize,
        kv_bytes=itemsize,
        recurrent=recurrent,
    )


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


class DrafterSizes(NamedTuple):
    """The sizes of a drafter with weights."""

    reads: ModelSizes  # sizes of one of its passes, the shared LM head included
    own_weights: float  # weights that it does not share with the target: what is trained and stored
    levels: int = 1  # levels of a draft that one pass gives
    training_steps: int = 1  # passes over each token in training: heads that learn from their own drafts have several
    window: int | None = None  # most KV rows that a token reads; None for the whole context


def drafter_sizes(method: str, target: ModelSizes) -> DrafterSizes | None:
    """Returns the usual sizes of a method's drafter for a target; None for methods without weights.

    Source: the layers as in the papers: EAGLE (arXiv 2401.15077) one block behind a projection of two vectors, EAGLE-3
    (2503.01840) of three, with its own LM head; Medusa (2401.10774) a block and an LM head for each level. HASS
    (2408.15766) learns from three steps of its own drafts, EAGLE-3 here from seven. SPiRe (2504.06419) as
    `foretoken.heads.spire` has it by default, with feedback. "self_sparse" stands for a target that drafts with all of
    its weights over a part of its KV cache (MagicDec, 2408.11049).
    """
    d, v = target.hidden_size, target.vocab_size
    block = max(target.active_weights - v * d, 0.0) / target.layers
    if method == "draft_model":
        share = _DRAFT_MODEL_SHARE
        weights = share * (target.weights + target.experts * target.expert_weights)
        small = _resized(target, weights, layers=max(round(share * target.layers), 1))
        return DrafterSizes(small, weights)
    if method in ("eagle", "hass"):
        steps = 3 if method == "hass" else 1
        return DrafterSizes(_resized(target, block + 2 * d**2 + v * d), block + 2 * d**2, training_steps=steps)
    if method == "eagle3":
        rows = min(v, _EAGLE3_VOCABULARY)
        wider = d * (target.heads + 2 * target.kv_heads) * target.head_dim
        weights = block + wider + (3 * d + rows) * d
        return DrafterSizes(_resized(target, weights, vocab_size=rows), weights, training_steps=7)
    if method == "medusa":
        weights = _NUM_HEADS * (d + v) * d
        return DrafterSizes(_resized(target, weights, layers=0, vocab_size=_NUM_HEADS * v), weights, levels=_NUM_HEADS)
    if method in ("hydra", "mlp_speculator"):
        level = (2 * d + v) * d
        return DrafterSizes(_resized(target, level, layers=0), _NUM_HEADS * level)
    return _windowed_sizes(method, target, block)


def _windowed_sizes(method: str, target: ModelSizes, block: float) -> DrafterSizes | None:
    """Returns the sizes of drafters that read a part of the context; block: weights of one of the target's."""
    if method == "self_sparse":
        return DrafterSizes(target, 0.0, window=_SPARSE_WINDOW)
    if method == "spire":
        keys_and_values = 2 * target.hidden_size * target.kv_heads * target.head_dim
        own = _SPIRE_LAYERS * block - (_SPIRE_LAYERS - 1) * keys_and_values  # which the further blocks do not have
        reads = _resized(target, own + target.vocab_size * target.hidden_size, layers=_SPIRE_LAYERS)
        return DrafterSizes(reads, own, training_steps=7, window=_SPIRE_WINDOW)
    return None


def _resized(target: ModelSizes, weights: float, *, layers: int = 1, vocab_size: int | None = None) -> ModelSizes:
    """Returns the sizes of a dense model with the target's attention."""
    return ModelSizes(
        layers=layers,
        hidden_size=target.hidden_size,
        heads=target.heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        vocab_size=target.vocab_size if vocab_size is None else vocab_size,
        weights=weights,
        weight_bytes=target.weight_bytes,
        kv_bytes=target.kv_bytes,
    )


# Medusa-1's recipe: 60,000 conversations of about 1,000 tokens, two epochs.
TRAINING_TOKENS = 120e6
_TRAINING_SHARE = 0.4  # of the arithmetic that a device can do; gives Medusa's figure, 5 hours on one A100 for 7B


def training_seconds(target: ModelSizes, drafter: DrafterSizes, peak_flops: float) -> float:
    """Returns the seconds to train a head: the target reads every token once, the head learns from it.

    `peak_flops` is the arithmetic of the device, in operations a second.

    Source: two operations a weight and token forward, six with the backward pass (Kaplan et al. 2020, arXiv
    2001.08361, section 2.1). Tokens: the recipe of Medusa-1 (arXiv 2401.10774, section 3).
    """
    flops = (2 * target.active_weights + 6 * drafter.training_steps * drafter.reads.weights) * TRAINING_TOKENS
    return flops / (_TRAINING_SHARE * peak_flops)
