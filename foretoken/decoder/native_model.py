"""Describes blocks, embedding and LM head for the native kernels: addresses and bounds.

Every tensor that the kernels get by address is checked once: dtype, shape, device, contiguous rows. The kernels check
the arguments of each pass. `current` notices memory that moves, but only before a pass: a thread that moves memory
while the kernels run ends the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.decoder.arguments import (
    MOST_INPUTS,
    ExpertsArguments,
    Layer,
    MatrixStruct,
    Model,
    NormStruct,
    RecurrentArguments,
)
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.blocks import (
    Block,
    BlockSpec,
    Experts,
    FeedForward,
    FeedForwardBlock,
    LeanWeights,
    Matrix,
    RecurrentBlock,
)
from foretoken.decoder.memory import Described, HeldMemory, has_memory, is_plain, lost_memory, use_huge_pages
from foretoken.decoder.mixers import LinearAttention
from foretoken.decoder.native_states import mixer_floats
from foretoken.decoder.panels import whole_panels
from foretoken.decoder.quantized import Quantization, QuantizedMatrix, bytes_per_weight, matrix_struct, quantized
from foretoken.decoder.quantized_modules import QuantizedLinear, quantized_parts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from foretoken.decoder import blocks as described
    from foretoken.decoder.mixers import ShortConvolution
    from foretoken.decoder.slot_cache import SlotCache

_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu2": 3}
_NORMS = {"rms": 0, "layer": 1}
_MOST_TAPS = 8  # `kMostTaps` of the kernels
_NO_HEADS = BlockSpec(num_heads=1, num_kv_heads=1, head_dim=16)  # of a model without attention; nothing reads them
_ANY_POSITION = 1 << 62  # bound of positions if no layer looks them up; above every context


class NativeModel(Described):
    """The kernels' description of a model, and its tensors; `structure`: see `kernels/interface.h`."""

    def __init__(
        self,
        layers: described.Blocks,
        ends: LeanWeights | None,
        cache: SlotCache,
        quantization: Quantization | None = None,
    ) -> None:
        """Takes addresses; copies only norms and biases, and matrices that are quantized.

        Args:
            layers: The blocks, on a CPU, in float32 or bfloat16.
            ends: The whole model, for its embedding and LM head; None for blocks alone.
            cache: In the same dtype, or quantized.
            quantization: For quantized copies of all matrices, also of the LM head but not of embedding
                and routers, beside the originals. None to read the weights in place, as they are stored.

        Raises:
            UnsuitableError: If a tensor does not fit the blocks' sizes, a weight that is not finite is to be
                quantized, or quantized matrices of a block with the same inputs round them in different ways.
        """
        super().__init__(layers, ends, cache, quantization)
        self._cache, self._dtype, self._quantization = cache, layers.dtype, quantization
        self._kept: list[Tensor] = []
        self._kept_rows: list[Tensor] = []
        self._vectors = _Vectors((layers if ends is None else ends).tensors())
        self._pass_bytes = _num_bytes(layers, ends, quantization)
        self._hidden = layers.hidden_size
        self._rows_like = next((keys for keys in cache.keys if keys.shape[1]), None)
        self._window = self._state_size = self._row_size = 0  # of recurrent layers
        spec = layers.attention[0].spec if layers.attention else _NO_HEADS
        self._heads, self._kv_heads, self._head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._num_positions = min(
            (block.rotary.cos.shape[0] for block in layers.attention if block.rotary is not None), default=_ANY_POSITION
        )
        self._layers = (Layer * len(layers.blocks))(*(self._layer(i, b) for i, b in enumerate(layers.blocks)))
        self.structure = self._model(layers, ends)
        self._memory = HeldMemory([*self._kept, *self._kept_rows])
        use_huge_pages(self._kept)

    def _model(self, layers: described.Blocks, ends: LeanWeights | None) -> Model:
        embedding, head, head_tokens = MatrixStruct(), MatrixStruct(), None
        if ends is not None:
            embedding = self._embedding(ends.embedding)
            head = self._head(ends.head)
            if ends.head_tokens is not None:
                head_tokens = self._address_of("the tokens of the LM head", ends.head_tokens, (head.rows,), torch.int64)
        experts, recurrent = [layer.experts for layer in self._layers], [layer.recurrent for layer in self._layers]
        return Model(
            is_bfloat16=self._dtype == torch.bfloat16,
            num_layers=len(self._layers),
            hidden=self._hidden,
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            vocab=embedding.rows,
            num_positions=self._num_positions,
            **self._cache_rows(),
            intermediate=max(layer.up.rows for layer in self._layers),
            num_experts=max(each.count for each in experts),
            top_k=max(each.top_k for each in experts),
            expert_intermediate=max(each.intermediate for each in experts),
            window=self._window,
            state_size=self._state_size,
            row_size=self._row_size,
            recurrent_width=max(each.width for each in recurrent),
            recurrent_channels=max(each.channels for each in recurrent),
            recurrent_heads=max(each.heads for each in recurrent),
            recurrent_outputs=max(each.output.cols for each in recurrent),
            recurrent_keys=max(each.key_dim for each in recurrent),
            embedding_scale=1.0 if ends is None else ends.embedding_scale,
            logit_scale=1.0 if ends is None else ends.logit_scale,
            logit_softcap=0.0 if ends is None else ends.logit_softcap or 0.0,
            embedding=embedding,
            final_norm=self._norm("the final norm", layers.final_norm, self._hidden),
            head=head,
            head_tokens=head_tokens,
            num_logits=head.rows if ends is None else ends.vocab_size,
            layers=self._layers,
        )

    def _layer(self, index: int, block: Block | RecurrentBlock | FeedForwardBlock) -> Layer:
        if not isinstance(block, Block):
            return self._recurrent_layer(index, block)
        spec, hidden, width = block.spec, self._hidden, self._head_dim
        if (spec.num_heads, spec.num_kv_heads, spec.head_dim) != (self._heads, self._kv_heads, width):
            raise UnsuitableError(f"block {index} has other heads than the first block. Expected the same in all.")
        queries, values = self._heads * width, self._kv_heads * width
        read = hidden if block.side is None else 2 * hidden
        normed = (queries, values) if block.norms_all_heads else (width, width)
        layer = Layer(
            query=self._matrix("q_proj", block.query, queries * (2 if block.gates_heads else 1), read),
            key=self._matrix("k_proj", block.key, values, read),
            value=self._matrix("v_proj", block.value, values, read),
            output=self._matrix("o_proj", block.output, hidden, queries),
            **self._mlp(block.mlp),
            attention_norm=self._norm("the norm before attention", block.attention_norm, hidden),
            attention_post_norm=self._norm("the norm after attention", block.attention_post_norm, hidden),
            mlp_norm=self._norm("the norm before the feed-forward layer", block.mlp_norm, hidden),
            mlp_post_norm=self._norm("the norm after the feed-forward layer", block.mlp_post_norm, hidden),
            side_norm=self._norm(
                "the norm of the second input", None if block.side is None else block.side.norm, hidden
            ),
            query_norm=self._norm("the norm of queries", block.query_norm, normed[0]),
            key_norm=self._norm("the norm of keys", block.key_norm, normed[1]),
            **self._rotary(block.rotary),
            keys=self._hold_rows("the keys' cache", self._cache.keys[index]),
            values=self._hold_rows("the values' cache", self._cache.values[index]),
            window=spec.window or 0,
            activation=_ACTIVATIONS[spec.activation],
            norms_all_heads=block.norms_all_heads,
            gates_heads=block.gates_heads,
            scale=spec.attention_scale,
            softcap=spec.softcap or 0.0,
            attention_factor=block.attention_factor,
            mlp_factor=block.mlp_factor,
            recurrent=self._mixer(index, block.beside),
        )
        _share_inputs(index, layer.query, layer.key, layer.value)
        _share_inputs(index, layer.gate, layer.up, layer.experts.shared_gate)
        return layer

    def _recurrent_layer(self, index: int, block: RecurrentBlock | FeedForwardBlock) -> Layer:
        mixer, norm = (None, None) if isinstance(block, FeedForwardBlock) else (block.mixer, block.attention_norm)
        layer = Layer(
            **self._mlp(block.mlp),
            attention_norm=self._norm("the norm before the mixer", norm, self._hidden),
            mlp_norm=self._norm("the norm before the feed-forward layer", block.mlp_norm, self._hidden),
            activation=_ACTIVATIONS[block.activation],
            mlp_factor=block.mlp_factor,
            recurrent=self._mixer(index, mixer),
        )
        _share_inputs(index, layer.gate, layer.up, layer.experts.shared_gate)
        return layer

    def _mixer(self, index: int, mixer: ShortConvolution | LinearAttention | None) -> RecurrentArguments:
        if mixer is None:
            return RecurrentArguments()
        if isinstance(mixer, LinearAttention):
            made, outputs = self._linear_attention(mixer), mixer.num_heads * mixer.value_dim
        else:
            made = self._short_convolution(mixer)
            outputs = made.channels
        made.output = self._matrix("the output projection", mixer.output, self._hidden, outputs)
        made.output_factor = mixer.output_factor
        _share_inputs(index, *made.inputs)
        return made

    def _short_convolution(self, mixer: ShortConvolution) -> RecurrentArguments:
        channels = int(mixer.convolution.weight.shape[0])
        row, gate, factor = (place * channels for place in mixer.order)
        projection = self._matrix("in_proj", mixer.projection, 3 * channels, self._hidden)
        return RecurrentArguments(
            kind=1, inputs=(MatrixStruct * MOST_INPUTS)(projection), num_inputs=1,
            width=3 * channels, row_at=row, gate_at=gate, factor_at=factor, **self._convolution(mixer),
        )  # fmt: skip

    def _linear_attention(self, mixer: LinearAttention) -> RecurrentArguments:
        heads, key_dim, value_dim = mixer.num_heads, mixer.key_dim, mixer.value_dim
        if key_dim % 4 or heads % mixer.num_key_heads or heads * value_dim % mixer.norm_size:
            raise UnsuitableError(
                f"a recurrent layer has {mixer.num_key_heads} heads of {key_dim} for keys, {heads} for values. "
                "Expected a multiple of 4, and as many or a multiple."
            )
        inputs = [
            self._matrix("a projection", each, int(each.weight.shape[0]), self._hidden) for each in mixer.projections
        ]
        width, places = sum(each.rows for each in inputs), None
        _check_columns(mixer, width)
        if mixer.places is not None:
            places = self._address_of("the places of projections", mixer.places, (width,), torch.int32)
        vectors = {"decay": mixer.decay, "step_bias": mixer.step_bias, "skip": mixer.skip}
        return RecurrentArguments(
            kind=2 if mixer.beta_scale else 3, inputs=(MatrixStruct * MOST_INPUTS)(*inputs), num_inputs=len(inputs),
            width=width, places=places, row_at=mixer.columns[0], gate_at=mixer.columns[1],
            query_at=mixer.channels[0], key_at=mixer.channels[1], value_at=mixer.channels[2],
            key_heads=mixer.num_key_heads, heads=heads, key_dim=key_dim, value_dim=value_dim,
            norm_size=mixer.norm_size, gates_first=mixer.gates_first, beta_scale=mixer.beta_scale,
            norm=self._norm("the norm of a recurrent layer", mixer.norm, heads * value_dim),
            factors=None if mixer.factors is None else self._copied("factors of projections", mixer.factors, width),
            **{name: self._copied(name, each, heads) for name, each in vectors.items() if each is not None},
            **self._convolution(mixer),
        )  # fmt: skip

    def _convolution(self, mixer: ShortConvolution | LinearAttention) -> dict[str, Any]:
        """Describes the weights of a convolution, and a layer's part of a block of states."""
        convolution, (state_size, row_size) = mixer.convolution, mixer_floats(mixer)
        channels, taps = convolution.weight.shape
        if not 2 <= taps <= _MOST_TAPS or self._window not in (0, taps - 1):
            raise UnsuitableError(
                f"a convolution reads {taps} tokens. Expected 2..{_MOST_TAPS}, in all layers as many."
            )
        weight = convolution.weight.detach().float().t().contiguous()
        self._kept.append(weight)
        places = {"state_at": self._state_size, "rows_before": self._row_size}
        self._window, self._state_size = taps - 1, self._state_size + state_size
        self._row_size += row_size
        bias = convolution.bias
        return places | {
            "channels": channels, "row_size": row_size, "taps": weight.data_ptr(),
            "tap_bias": None if bias is None else self._copied("the bias of a convolution", bias, channels),
        }  # fmt: skip

    def _mlp(self, mlp: FeedForward | Experts | None) -> dict[str, Any]:
        if mlp is None:
            return {}
        return self._experts(mlp) if isinstance(mlp, Experts) else self._feed_forward(mlp)

    def _feed_forward(self, layers: FeedForward) -> dict[str, Any]:
        hidden, inner = self._hidden, int(layers.down.weight.shape[1])
        return {
            "gate": MatrixStruct() if layers.gate is None else self._matrix("gate_proj", layers.gate, inner, hidden),
            "up": self._matrix("up_proj", layers.up, inner, hidden),
            "down": self._matrix("down_proj", layers.down, hidden, inner),
            "gate_factor": layers.gate_factor,
        }

    def _experts(self, experts: Experts) -> dict[str, Any]:
        count, inner, router = experts.count, experts.intermediate, experts.router
        if isinstance(router.weight, QuantizedMatrix):
            raise UnsuitableError(f"a router has no kernels for weights in {router.weight.bits} bits.")
        fields = ExpertsArguments(
            router=self._matrix("the router", router, count, self._hidden, can_quantize=False),
            gate_up=self._experts_matrix(
                "gate_up_proj", experts.gate_up, (count, 2 if experts.is_gated else 1, inner, self._hidden)
            ),
            down=self._experts_matrix("down_proj", experts.down, (count, 1, self._hidden, inner)),
            count=count,
            top_k=experts.top_k,
            intermediate=inner,
            is_normalised=experts.is_normalized,
            is_sigmoid=experts.is_sigmoid,
            is_gated=experts.is_gated,
            epsilon=experts.epsilon,
            factor=experts.factor,
        )
        if experts.score_bias is not None:
            fields.score_bias = self._copied("the bias of scores", experts.score_bias, count)
        if experts.shared_gate is not None:
            fields.shared_gate = self._matrix("shared_expert_gate", experts.shared_gate, 1, self._hidden)
        return {"experts": fields, **({} if experts.shared is None else self._feed_forward(experts.shared))}

    def _experts_matrix(
        self, name: str, weight: Tensor | QuantizedMatrix, sizes: tuple[int, int, int, int]
    ) -> MatrixStruct:
        """Describes the matrices of all experts; sizes: experts, matrices of each, rows and columns of a matrix."""
        count, parts, rows, cols = sizes
        name = f"{name} of the experts"
        if isinstance(weight, Tensor):
            self._check_layout(name, weight.detach(), (count, parts * rows, cols), self._dtype)
            weight = weight.detach()
            if self._quantization is None:
                struct = self._matrix(name, Matrix(weight=weight.flatten(0, 1)), count * parts * rows, cols)
                struct.pass_bytes = 0  # a pass reads some of the experts
                return struct
            weight = quantized_parts(weight, parts, self._quantization, dtype=torch.bfloat16)
        return self._matrix(name, Matrix(weight=weight), count * parts * whole_panels(rows), cols)

    def _rotary(self, rotary: described.Rotary | None) -> dict[str, Any]:
        if rotary is None:
            return {"pairs": 0}
        shape = rotary.cos.shape[0], rotary.cos.shape[1]
        if not 2 <= 2 * shape[1] <= self._head_dim:
            raise UnsuitableError(
                f"the table of cosines is {shape}. Expected (positions, up to {self._head_dim // 2}), half of a head."
            )
        return {
            "pairs": shape[1],
            "cos": self._address_of("the table of cosines", rotary.cos, shape),
            "sin": self._address_of("the table of sines", rotary.sin, shape),
        }

    def _embedding(self, table: Tensor | QuantizedMatrix) -> MatrixStruct:
        if table.dtype != self._dtype:
            raise UnsuitableError(f"the embedding has rows in {table.dtype}. Expected {self._dtype}.")
        return self._in_place("the embedding", table, int(table.shape[0]), self._hidden)

    def _head(self, head: Any) -> MatrixStruct:
        if type(head) not in (torch.nn.Linear, QuantizedLinear):
            raise UnsuitableError(f"the LM head is a {type(head).__name__}. Expected a plain linear layer.")
        return self._matrix("lm_head", Matrix.of(head), int(head.out_features), self._hidden)

    def _matrix(self, name: str, matrix: Matrix, rows: int, cols: int, *, can_quantize: bool = True) -> MatrixStruct:
        weight = matrix.weight
        if isinstance(weight, Tensor) and self._quantization is not None and can_quantize:
            self._check_layout(name, weight.detach(), (rows, cols), self._dtype)
            weight = quantized(weight, self._quantization, dtype=torch.bfloat16)
        struct = self._in_place(name, weight, rows, cols, self._pass_bytes)
        struct.bias = self._bias(name, matrix.bias, rows)
        return struct

    def _in_place(
        self, name: str, weight: Tensor | QuantizedMatrix, rows: int, cols: int, pass_bytes: int = 0
    ) -> MatrixStruct:
        if isinstance(weight, Tensor):
            weight = weight.detach()
            self._check_layout(name, weight, (rows, cols), self._dtype)
        else:
            if weight.shape != (rows, cols):
                raise UnsuitableError(f"{name} is {tuple(weight.shape)}. Expected {(rows, cols)}.")
            for part in weight.tensors():
                self._check_layout(f"a part of {name}", part, tuple(part.shape), part.dtype)
        self._kept += [weight] if isinstance(weight, Tensor) else weight.tensors()
        return matrix_struct(weight, pass_bytes=pass_bytes)

    def _bias(self, name: str, bias: Tensor | None, rows: int) -> int | None:
        return None if bias is None else self._copied(f"the bias of {name}", bias, rows)

    def _norm(self, name: str, norm: described.Norm | None, size: int) -> NormStruct:
        if norm is None:
            return NormStruct()
        return NormStruct(
            weight=self._copied(name, norm.weight, size),
            bias=None if norm.bias is None else self._copied(f"the bias of {name}", norm.bias, size),
            epsilon=norm.epsilon,
            kind=_NORMS[norm.kind],
        )

    def _copied(self, name: str, vector: Tensor, size: int) -> int:
        if vector.shape != (size,) or not is_plain(vector):
            raise UnsuitableError(f"{name} is a {type(vector).__name__} {tuple(vector.shape)}. Expected ({size},).")
        if not has_memory(vector):
            raise UnsuitableError(lost_memory(vector))
        return self._vectors.copy(vector)

    def _cache_rows(self) -> dict[str, int]:
        keys, made = self._rows_like, {"capacity": self._cache.capacity, "rows_are_rounded": self._cache.is_rounded}
        if keys is None:  # no rows at all
            return made | {"num_slots": self._cache.num_slots, "layer_rows": self._cache.capacity}
        slot_rows, head_rows = (stride // keys.shape[3] for stride in keys.stride()[:2])
        return made | {
            "num_slots": len(keys), "slot_rows": slot_rows, "head_rows": head_rows,
            "layer_rows": self._kv_heads * self._cache.num_rows,
        }  # fmt: skip

    def _hold_rows(self, name: str, rows: Tensor) -> int:
        """Returns the address of a layer's keys or values; their strides must be those of every other layer."""
        width, dtype, first = self._head_dim, self._dtype, rows if self._rows_like is None else self._rows_like
        if self._cache.is_rounded:
            width, dtype = width + torch.float32.itemsize, torch.int8
        self._check_layout(name, rows[0, 0], (self._cache.capacity, width), dtype)
        if rows.shape != (len(first), self._kv_heads, self._cache.capacity, width) or rows.stride() != first.stride():
            raise UnsuitableError(f"{name} differs in size between layers. Expected one size of keys and values.")
        self._kept_rows.append(rows)
        return rows.data_ptr()

    def _address_of(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        self._check_layout(name, tensor, shape, dtype)
        self._kept.append(tensor)
        return tensor.data_ptr()

    @staticmethod
    def _check_layout(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        subclass = "" if type(tensor) is Tensor else f"a {type(tensor).__name__} "  # the address of a subclass may be 0
        is_as_said = not subclass and tensor.shape == shape and tensor.dtype == dtype
        if not is_as_said or not tensor.is_cpu or not tensor.is_contiguous():
            raise UnsuitableError(
                f"{name} is {subclass}{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}. Expected {shape} "
                f"{dtype} on a CPU, contiguous."
            )
        if not has_memory(tensor):
            raise UnsuitableError(lost_memory(tensor))


def _check_columns(mixer: LinearAttention, width: int) -> None:
    """Raises `UnsuitableError` if a recurrent layer reads beyond the `width` columns of a token, or its channels."""
    channels, keys = int(mixer.convolution.weight.shape[0]), mixer.num_key_heads * mixer.key_dim
    values, gates = mixer.num_heads * mixer.value_dim, mixer.num_heads * (2 if mixer.beta_scale else 1)
    read = [(start, size, channels) for start, size in zip(mixer.channels, (keys, keys, values), strict=True)]
    read += [(mixer.columns[0], channels + gates, width), (mixer.columns[1], values, width)]
    wrong = [each for each in read if each[0] < 0 or each[0] + each[1] > each[2]]
    if wrong:
        start, size, end = wrong[0]
        raise UnsuitableError(f"a recurrent layer reads {size} numbers from {start} on. Expected them within {end}.")


def _share_inputs(index: int, *matrices: MatrixStruct) -> None:
    """Lets quantized matrices with the same inputs round them alike, as finely as the finest: the kernels round once.

    Raises `UnsuitableError` if they differ in the inputs that share a scale, or in the order of inputs.
    """
    found = [each for each in matrices if each.bits]
    if len({(each.input_group == 0, each.input_order) for each in found}) > 1:
        raise UnsuitableError(f"matrices of block {index} with the same inputs round them in different ways.")
    bits = max((each.input_bits for each in found), default=0)
    group = min((each.input_group for each in found), default=0)
    for each in found:
        each.input_group = group
        each.input_bits = bits


def _num_bytes(layers: described.Blocks, ends: LeanWeights | None, quantization: Quantization | None) -> int:
    matrices = [tensor for tensor in layers.tensors() if tensor.dim() > 1]
    head = () if ends is None else (*ends.head.parameters(), *ends.head.buffers())
    matrices += [each for each in head if each.dim() > 1]
    size = None if quantization is None else bytes_per_weight(quantization)
    return int(sum(each.numel() * (each.itemsize if size is None else size) for each in matrices))


class _Vectors:
    """Norms and biases in float32, side by side in memory of their own."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._memory = torch.empty(
            sum(_padded(each.numel()) for each in tensors if each.dim() == 1), dtype=torch.float32, device="cpu"
        )
        self._used = 0

    def copy(self, vector: Tensor) -> int:
        place = self._memory[self._used : self._used + vector.numel()]
        place.copy_(vector.detach())
        self._used += _padded(vector.numel())
        return place.data_ptr()


def _padded(count: int) -> int:
    """Rounds a number of float32 elements up to whole cache lines."""
    return -(-count // 16) * 16
