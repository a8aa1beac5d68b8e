"""Reads the weights for lean decoders straight from a GGUF file, without transformers, which takes seconds to import.

For the architectures that most files have; the others, and files with tensors that do not fit, are read through the
model of transformers. The self-test compares a decoder on these weights with that model.

Letters: E hidden size, H query heads, Hk KV heads, D head size, I width of the feed-forward layer, V vocabulary.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Thread, main_thread
from typing import TYPE_CHECKING, Any

import torch

from foretoken.decoder.blocks import (
    Block,
    Blocks,
    BlockSpec,
    FeedForward,
    LeanWeights,
    Matrix,
    Norm,
    Rotary,
)
from foretoken.decoder.native_linear import linear_layer
from foretoken.decoder.quantized import QuantizedLinear, QuantizedMatrix
from foretoken.models.architectures import ARCHITECTURES, LeanArchitecture
from foretoken.models.quantization.gguf_config import ROPE_FACTORS
from foretoken.models.quantization.stored import label_of_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from foretoken.models.quantization.gguf_config import Settings


_BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"), "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}  # fmt: skip
_ROPES = {"default", "linear", "llama3"}


@dataclass(frozen=True, kw_only=True)
class LeanFile:
    """A file whose weights lean decoders can have.

    Attributes:
        settings: Of an architecture that is known here, with all tensors in their shapes.
        lean: The architecture's row for lean decoders.
        dtype: Of inputs and outputs, float32 or bfloat16.
        input_bits: Of matrices in integers, see `QuantizedMatrix`; None for those of the dtype.
    """

    settings: Settings
    lean: LeanArchitecture
    dtype: torch.dtype
    input_bits: int | None = None

    @property
    def label(self) -> str:
        """The types of the matrices in integers, for people."""
        types = {each.type_name for each in self.settings.file.tensors.values() if each.is_quantized}
        return label_of_inputs(f"GGUF, {' and '.join(sorted(types or {'not quantized'}))}", self.input_bits)

    @property
    def num_bytes(self) -> int:
        """Of the weights in memory."""
        file = self.settings.file
        return sum(file.bytes_in_memory(name, self.dtype) for name in file.tensors)

    def read_beside(self) -> Callable[[], None]:
        """Starts a thread that reads the matrices without Python's lock, so that the tokenizer can be read meanwhile.

        The thread ends when the main thread does, so that Ctrl-C ends the process.

        Returns:
            A function that waits until all are read, and raises `ModelError` as `weights`. In a process that was forked
            meanwhile, which has no such thread, it returns at once.
        """
        done, process = Future[None](), os.getpid()

        def read() -> None:
            try:
                for name, stored in self.settings.file.tensors.items():
                    if stored.is_matrix and main_thread().is_alive():
                        self._matrix(name.removesuffix(".weight"))
            except BaseException as err:  # noqa: BLE001 - told to those that wait
                done.set_exception(err)
            else:
                done.set_result(None)

        Thread(target=read).start()  # an executor's thread would be waited for at the end of the process
        return lambda: done.result() if os.getpid() == process else None

    def bytes_read(self) -> tuple[int, int]:
        """Returns the bytes of matrices in integers: those read so far, from any thread, and all."""
        tensors = self.settings.file.tensors
        read = [tensors[name].num_bytes for name, _ in list(self.settings.file.kept)]
        return sum(read), sum(each.num_bytes for each in tensors.values() if each.is_quantized)

    def weights(self, num_positions: int) -> LeanWeights:
        """Reads the weights; matrices are read once.

        Args:
            num_positions: Rows of the rotary tables.

        Raises:
            ModelError: For numbers that are not finite.
        """
        fields, rotary = self.settings.fields, dict[str, Rotary]()
        blocks = []
        for layer in range(fields["num_hidden_layers"]):
            kind = fields["layer_types"][layer] if "layer_types" in fields else "full_attention"
            if kind not in rotary:
                rotary[kind] = self._rotary(kind, min(num_positions, fields["max_position_embeddings"]))
            blocks.append(self._block(layer, kind, rotary[kind]))
        scale = torch.tensor(fields["hidden_size"] ** 0.5, dtype=self.dtype).item()
        return LeanWeights(
            embedding=self._matrix("token_embd"),
            embedding_scale=scale if self.settings.architecture.scales_embedding else 1.0,
            layers=Blocks(blocks=blocks, final_norm=self._norm("output_norm")),
            head=self._head,
            logit_softcap=None,
            is_borrowed=False,
        )

    @cached_property
    def _head(self) -> nn.Module:
        weight = self._matrix("output" if "output.weight" in self.settings.file.tensors else "token_embd")
        return QuantizedLinear(weight) if isinstance(weight, QuantizedMatrix) else linear_layer(weight)

    def _block(self, layer: int, kind: str, rotary: Rotary) -> Block:
        fields, at = self.settings.fields, f"blk.{layer}."
        head_dim = _head_dim(fields)
        query, key, value, output, gate, up, down = (
            Matrix(weight=self._matrix(at + name), bias=self._bias(at + name))
            for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        )
        attention_norm, attention_post_norm, mlp_norm, mlp_post_norm = (
            None if name is None else self._norm(at + name) for name in _norms(self.settings, self.lean)
        )
        return Block(
            spec=BlockSpec(
                num_heads=fields["num_attention_heads"],
                num_kv_heads=fields["num_key_value_heads"],
                head_dim=head_dim,
                scale=fields.get("query_pre_attn_scalar", head_dim) ** -0.5,
                window=fields["sliding_window"] if kind == "sliding_attention" else None,
                activation=self.settings.architecture.activation,
            ),
            query=query,
            key=key,
            value=value,
            output=output,
            mlp=FeedForward(gate=gate, up=up, down=down),
            attention_norm=attention_norm,
            attention_post_norm=attention_post_norm,
            mlp_norm=mlp_norm,
            mlp_post_norm=mlp_post_norm,
            query_norm=self._norm(f"{at}attn_q_norm") if self.settings.architecture.has_head_norms else None,
            key_norm=self._norm(f"{at}attn_k_norm") if self.settings.architecture.has_head_norms else None,
            rotary=rotary,
        )

    def _rotary(self, kind: str, num_positions: int) -> Rotary:
        """Returns tables with the bits of transformers', which computes in float32 and in this order."""
        fields = self.settings.fields
        rope = _rope(fields, kind)
        head_dim = _head_dim(fields)
        steps = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / (rope["rope_theta"] ** steps)
        if rope["rope_type"] == "linear":
            frequencies = frequencies / rope["factor"]
        elif rope["rope_type"] == "llama3":
            frequencies = frequencies / self.settings.file.dense(ROPE_FACTORS).float()
        angles = torch.arange(num_positions).float().unsqueeze(1) * frequencies
        return Rotary(cos=angles.cos(), sin=angles.sin())

    def _matrix(self, name: str) -> Tensor | QuantizedMatrix:
        full = f"{name}.weight"
        order = self.settings.row_order(full)
        if self.settings.file.tensors[full].is_quantized:
            found = self.settings.file.matrix(full, self.dtype, order)
            return found if self.input_bits is None else replace(found, input_bits=self.input_bits)
        if full not in self._dense:
            self._dense[full] = self.settings.file.dense(full, order).to(self.dtype)
        return self._dense[full]

    @cached_property
    def _dense(self) -> dict[str, Tensor]:
        return {}

    def _bias(self, name: str) -> Tensor | None:
        full = f"{name}.bias"
        if full not in self.settings.file.tensors:
            return None
        return self.settings.file.dense(full, self.settings.row_order(full)).to(self.dtype)

    def _norm(self, name: str) -> Norm:
        """Returns a norm with weights rounded as in transformers' model, which has those of Gemma less 1."""
        offset = self.lean.norm_offset
        rounded = (self.settings.file.dense(f"{name}.weight").float() - offset).to(self.dtype).float()
        return Norm(weight=rounded + offset, epsilon=self.settings.fields["rms_norm_eps"])


def lean_file(settings: Settings, dtype: torch.dtype, input_bits: int | None = None) -> LeanFile | None:
    """Returns a file that lean decoders can have; None if transformers has to read, or to refuse it."""
    architecture, fields, lean = settings.architecture, settings.fields, ARCHITECTURES[settings.model_type].lean
    known = {"sliding_window"} if architecture.window else set()
    if lean is None or not architecture.is_lean or not known.issuperset(settings.others.values()):
        return None
    if any(
        _rope(fields, kind)["rope_type"] not in _ROPES for kind in {"full_attention", *fields.get("layer_types", ())}
    ):
        return None
    found = {name: each.shape for name, each in settings.file.tensors.items() if name != ROPE_FACTORS}
    shapes = _shapes(settings, lean)
    if not fields["tie_word_embeddings"]:
        shapes["output.weight"] = shapes["token_embd.weight"]
    return LeanFile(settings=settings, lean=lean, dtype=dtype, input_bits=input_bits) if found == shapes else None


def _norms(settings: Settings, lean: LeanArchitecture) -> list[str | None]:
    """Returns the file's names of `LeanArchitecture.norms`."""
    names = {theirs: name for name, theirs in settings.architecture.parts.items()}
    return [None if each is None else names[each] for each in lean.norms]


def _head_dim(fields: dict[str, Any]) -> int:
    return int(fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"])


def _rope(fields: dict[str, Any], kind: str) -> dict[str, Any]:
    rope: dict[str, Any] = fields["rope_parameters"]
    own: dict[str, Any] = rope.get(kind, rope)
    return own


def _shapes(settings: Settings, lean: LeanArchitecture) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors of a model, but for those of its LM head: no other tensor is left unread."""
    fields, architecture = settings.fields, settings.architecture
    hidden, inner, head_dim = fields["hidden_size"], fields["intermediate_size"], _head_dim(fields)
    queries, keys = fields["num_attention_heads"] * head_dim, fields["num_key_value_heads"] * head_dim
    matrices = {
        "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    biases = {*architecture.biases, *(part for key, parts in _BIASES.items() if fields.get(key) for part in parts)}
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (fields.get("vocab_size", 0), hidden),
        "output_norm.weight": (hidden,),
    }
    for layer in range(fields["num_hidden_layers"]):
        at = f"blk.{layer}."
        found |= {f"{at}{name}.weight": shape for name, shape in matrices.items()}
        found |= {f"{at}{name}.bias": matrices[name][:1] for name in biases}
        found |= {f"{at}{name}.weight": (hidden,) for name in _norms(settings, lean) if name is not None}
        if architecture.has_head_norms:
            found |= {f"{at}attn_{name}_norm.weight": (head_dim,) for name in ("q", "k")}
    return found
