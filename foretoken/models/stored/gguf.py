"""Opens GGUF files of llama.cpp: as transformers models whose matrices stay in integers, and as lean weights.

Each tensor of a file is one weight of transformers, except for experts: a file has three tensors for all experts of a
layer, gate, up and down. What llama.cpp's conversion did to values, rows and columns is undone. A setting or a tensor
that is not known is refused, because it may change the model.

`LeanFile` reads the weights for lean decoders without transformers, which takes seconds to import: for the
architectures that most files have. Other files, and files with tensors that do not fit, are read through the model of
transformers. The self-test compares a decoder on lean weights with that model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from threading import Thread, main_thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import ModelError, foreign_errors_as, listed
from foretoken.decoder.blocks import Block, Blocks, BlockSpec, FeedForward, LeanWeights, Matrix, Norm, Rotary
from foretoken.decoder.native_linear import linear_layer
from foretoken.decoder.panels import PANEL
from foretoken.decoder.quantized import QuantizedMatrix
from foretoken.decoder.quantized_modules import QuantizedLinear, are_plain_experts, is_plain_embedding, stacked
from foretoken.models.architectures import ARCHITECTURES, GgufArchitecture, LeanArchitecture
from foretoken.models.stored import PARTS, StoredModel, experts_of, label_of_inputs
from foretoken.models.stored.gguf_config import BLOCK, LONG_ROPE_FACTORS, ROPE_FACTORS, Settings, read_settings, refusal
from foretoken.models.stored.gguf_file import GgufFile, read_gguf
from foretoken.models.stored.gguf_hybrids import half_rows, halves_of, joined_order, logarithms, stored_shape
from foretoken.models.stored.gguf_tokenizer import build_tokenizer, read_vocabulary
from foretoken.models.weight_files import meta_model, untied_shapes

if TYPE_CHECKING:
    from foretoken.models.stored.gguf_header import StoredTensor

_EMBEDDING = "model.embed_tokens"
_OUTER = {"token_embd": _EMBEDDING, "output_norm": "model.norm", "output": "lm_head"}
_EXPERTS = re.compile(r"(.*\.experts)\.(?:gate|up|down)_proj\.(weight|bias)")  # all of a layer
_BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"), "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}  # fmt: skip
_ROPES = {"default", "linear", "llama3"}  # whose tables `LeanFile` computes


def open_gguf(path: Path) -> StoredModel:
    """Opens a GGUF file, or a split model by its first file; its tensors are read later, one at a time.

    Raises `ModelError` if the file is damaged or incomplete, or the architecture or the type of a tensor is not known.
    """
    return stored_model(read_settings(read_gguf(path)))


def stored_model(settings: Settings) -> StoredModel:
    """Returns the model of a file that was opened.

    Matrices in the types of `gguf_blocks.FORMATS` keep their integers and scales; F32, F16 and BF16 are read as they
    are. If there is no LM head, the LM head shares a quantized embedding's integers.
    """
    file, architecture, config = settings.file, settings.architecture, settings.config()
    names, table = _tensor_names(file, architecture), architecture.outer.get("token_embd", _EMBEDDING)
    embedding = file.tensors.get("token_embd.weight")
    if config.tie_word_embeddings and embedding is not None and embedding.is_quantized:
        config.tie_word_embeddings = False
        names["lm_head.weight"] = "token_embd.weight"
    module = _checked_module(settings, config, names)
    shapes = untied_shapes(module)
    halves = halves_of(shapes, names)
    in_integers = _in_integers(settings, module, names, halves)
    has_rows = embedding is not None and embedding.is_quantized and is_plain_embedding(module.get_submodule(table))
    in_integers |= {table: (f"{table}.weight",)} if has_rows else {}
    kept = set(chain.from_iterable(in_integers.values()))

    def matrix(part: str, dtype: torch.dtype) -> QuantizedMatrix:
        expert = None if experts_of(part) is None else int(part.rsplit(".", 2)[1])
        own = [names[key] for key in in_integers[part]]
        parts = [file.matrix(name, dtype, settings.row_order(name), part=expert) for name in own]
        if len(parts) > 1:
            rows = joined_order(settings.fields, part)
            return stacked(parts, None if rows is None else _panels(rows))
        order = settings.column_order(own[0])
        return parts[0] if order is None else replace(parts[0], input_order=order.argsort().int())

    def dense(dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = {key: restored(settings, name).to(dtype) for key, name in names.items() if key not in kept}
        for linear in halves.keys() - in_integers.keys():
            both, order = torch.cat([tensors.pop(key) for key in halves[linear]]), joined_order(settings.fields, linear)
            tensors[f"{linear}.weight"] = both if order is None else both[order]
        tensors |= {key: tensors[key].view(shapes[key]) for key in tensors.keys() & shapes.keys()}
        for owner, kind in sorted({match.groups() for key in tensors if (match := _EXPERTS.fullmatch(key))}):
            keys = [key for part in PARTS if (key := f"{owner}.{part}.{kind}") in names]
            parts = [tensors.pop(key) for key in keys if key in tensors]
            if len(parts) == len(keys):  # `build` refuses some of them in integers
                tensors |= _joined_experts(owner, kind, config, *parts)
        return tensors

    return StoredModel(
        config=config, label=_label(file, (names[key] for key in kept)), linears=frozenset(in_integers) - {table},
        matrix=matrix, dense=dense, embedding=table if has_rows else None,
    )  # fmt: skip


def _in_integers(
    settings: Settings, module: nn.Module, names: dict[str, str], halves: dict[str, tuple[str, str]]
) -> dict[str, tuple[str, ...]]:
    """Returns the tensors of each linear layer that stays in integers; experts apart."""
    stored = {key: settings.file.tensors[name] for key, name in names.items()}
    found: dict[str, tuple[str, ...]] = {
        linear: keys
        for linear, keys in halves.items()
        if _can_be_stacked([stored[key] for key in keys], joined_order(settings.fields, linear))
    }
    for linear, part in module.named_modules():
        key = f"{linear}.weight"
        if type(part) is nn.Linear and key in stored and stored[key].is_quantized:
            found[linear] = (key,)
    for key in filter(_EXPERTS.fullmatch, names):
        owner, part, _ = key.rsplit(".", 2)
        if stored[key].is_quantized and are_plain_experts(module.get_submodule(owner)):
            found |= {f"{owner}.{expert}.{part}": (key,) for expert in range(stored[key].shape[0])}
    return found


def _can_be_stacked(parts: list[StoredTensor], order: Tensor | None) -> bool:
    """Decides whether matrices can be one in integers: of one type, in whole panels of rows."""
    types, is_whole = {each.type_name for each in parts}, all(each.shape[0] % PANEL == 0 for each in parts)
    if len(types) > 1 or not parts[0].is_quantized or not is_whole:
        return False
    return order is None or torch.equal(order.view(-1, PANEL), PANEL * _panels(order)[:, None] + torch.arange(PANEL))


def _panels(order: Tensor) -> Tensor:
    """Returns the order of panels for an order of rows that keeps them whole, (panels,) int64."""
    return order[::PANEL] // PANEL


def _label(file: GgufFile, names: Iterable[str]) -> str:
    """Returns the types of tensors in integers, for people."""
    types = {file.tensors[name].type_name for name in names if file.tensors[name].is_quantized} or {"not quantized"}
    return f"GGUF, {' and '.join(sorted(types))}"


def restored(settings: Settings, name: str) -> Tensor:
    """Returns a tensor with transformers' values, rows and columns."""
    tensor, offset = settings.file.dense(name, settings.row_order(name)), settings.architecture.norm_offset
    if offset and name.endswith("norm.weight") and not name.endswith(".ssm_norm.weight"):
        return tensor.float() - offset
    if name.endswith(".ssm_a"):
        return logarithms(settings, name, tensor)
    order = settings.column_order(name)
    return tensor if order is None else tensor[:, order]


def _joined_experts(owner: str, kind: str, config: Any, *parts: Tensor) -> dict[str, Tensor]:
    if len(parts) == 2:  # without gates
        return {f"{owner}.up_proj": parts[0], f"{owner}.down_proj": parts[1]}
    gate, up, down = parts
    names = [f"{owner}.{part}{'_bias' if kind == 'bias' else ''}" for part in ("gate_up_proj", "down_proj")]
    if config.model_type != "gpt_oss":
        return dict(zip(names, (torch.cat([gate, up], 1), down), strict=True))
    both = torch.stack([gate, up], 2).flatten(1, 2)  # a row of gate, one of up, and so on
    joined = (both, down) if kind == "bias" else (both.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous())
    return dict(zip(names, joined, strict=True))


def _tensor_names(file: GgufFile, architecture: GgufArchitecture) -> dict[str, str]:
    """Returns the file's name of every weight of transformers."""
    names, unknown = dict[str, str](), []
    for name in file.tensors:
        if name in (ROPE_FACTORS, *LONG_ROPE_FACTORS):
            continue
        key = key_of(name, architecture)
        if key is None or key in names:
            unknown.append(name)
        else:
            names[key] = name
    if unknown:
        raise ModelError(
            f"'{file.path}' has tensors that its architecture lacks: {listed(unknown)}. Expected only known tensors. "
            "Use another file, or safetensors of the model."
        )
    return names


def key_of(name: str, architecture: GgufArchitecture) -> str | None:
    """Returns the name in transformers of a file's tensor, None for an unknown one."""
    match, outer = BLOCK.fullmatch(name), {**_OUTER, **architecture.outer}
    layer = f"{outer['token_embd'].rpartition('.')[0]}.layers.{match[1]}" if match else ""
    if match and match[2] in architecture.own_weights:
        return f"{layer}.{architecture.own_weights[match[2]]}"
    stem, _, kind = (match[2] if match else name).rpartition(".")
    part = architecture.parts.get(stem) if match else outer.get(stem)
    if part is None or kind not in ("weight", "bias"):
        return None
    return f"{layer}.{part}.{kind}" if match else f"{part}.{kind}"


def _checked_module(settings: Settings, config: Any, names: dict[str, str]) -> nn.Module:
    module, file = meta_model(config), settings.file
    shapes = {} if module is None else _file_shapes(untied_shapes(module), settings, names)
    wrong = [f"{key} is missing" for key in shapes if key not in names]
    wrong += [f"{name} is not used" for key, name in names.items() if key not in shapes]
    wrong += [
        f"{names[key]} is {list(file.tensors[names[key]].shape)} instead of {list(shape)}"
        for key, shape in shapes.items()
        if key in names and file.tensors[names[key]].shape not in (shape, shape[1:] if shape[0] == 1 else shape)
    ]
    if module is None or wrong:
        raise ModelError(
            f"the tensors of '{file.path}' do not fit its settings: {listed(wrong) or 'they describe no model'}. "
            "Copy or download the file again."
        )
    return module


def _file_shapes(
    shapes: dict[str, tuple[int, ...]], settings: Settings, names: dict[str, str]
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's weights as files have them."""
    found, halves = dict[str, tuple[int, ...]](), halves_of(shapes, names)
    for key, shape in shapes.items():
        owner, _, part = key.rpartition(".experts.")
        own = (shape[0], *reversed(shape[1:])) if settings.model_type == "gpt_oss" else shape
        kind = "bias" if part.endswith("_bias") else "weight"
        if part.startswith("gate_up_proj"):
            half = (own[0], own[1] // 2, *own[2:])
            found |= {f"{owner}.experts.{each}.{kind}": half for each in ("gate_proj", "up_proj")}
        elif part.startswith(("up_proj", "down_proj")):
            found[f"{owner}.experts.{part.removesuffix('_bias')}.{kind}"] = own
        elif (linear := key.removesuffix(".weight")) in halves:
            rows = half_rows(settings.fields, linear, shape[0])
            found |= {half: (each, shape[1]) for half, each in zip(halves[linear], rows, strict=True)}
        else:
            found[key] = stored_shape(settings.fields, key, shape)
    return found


def gguf_tokenizer(path: Path) -> Any | None:
    """Returns the tokenizer of a GGUF file, None if the file has none; raises `ModelError` if it is damaged."""
    file = read_gguf(path)
    vocabulary = read_vocabulary(file)
    if not vocabulary.tokens:
        return None
    with foreign_errors_as(ModelError, lambda err: refusal("tokenizer", path, err), passing=(ModelError,)):
        return build_tokenizer(file, vocabulary)


@dataclass(frozen=True, kw_only=True)
class LeanFile:
    """A GGUF file that lean decoders read without transformers.

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
        """As in `StoredModel`."""
        return label_of_inputs(_label(self.settings.file, self.settings.file.tensors), self.input_bits)

    @property
    def num_bytes(self) -> int:
        """Of the weights in memory."""
        file = self.settings.file
        return sum(file.bytes_in_memory(name, self.dtype) for name in file.tensors)

    def read_beside(self) -> Callable[[], None]:
        """Starts a thread that reads the matrices without Python's lock, so that the tokenizer can be read meanwhile.

        Returns a function that waits until all are read, and raises `ModelError` as `weights`. In a process that was
        forked meanwhile, which has no such thread, it returns at once. The thread ends when the main thread does.
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
        """Reads the weights, with `num_positions` rows of rotary tables; matrices are read once.

        Raises `ModelError` for numbers that are not finite.
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
        norms: Any = {field: self._norm(at + name) for field, name in _norms(self.settings, self.lean).items()}
        if self.settings.architecture.has_head_norms:
            norms |= {"query_norm": self._norm(f"{at}attn_q_norm"), "key_norm": self._norm(f"{at}attn_k_norm")}
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
            rotary=rotary,
            **norms,
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


def _norms(settings: Settings, lean: LeanArchitecture) -> dict[str, str]:
    """Returns the file's names of `LeanArchitecture.norms`."""
    names = {theirs: name for name, theirs in settings.architecture.parts.items()}
    return {field: names[name] for field, name in lean.norms.items()}


def _head_dim(fields: dict[str, Any]) -> int:
    return int(fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"])


def _rope(fields: dict[str, Any], kind: str) -> dict[str, Any]:
    rope: dict[str, Any] = fields["rope_parameters"]
    own: dict[str, Any] = rope.get(kind, rope)
    return own


def _shapes(settings: Settings, lean: LeanArchitecture) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all tensors of a model except its LM head."""
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
        found |= {f"{at}{name}.weight": (hidden,) for name in _norms(settings, lean).values()}
        if architecture.has_head_norms:
            found |= {f"{at}attn_{name}_norm.weight": (head_dim,) for name in ("q", "k")}
    return found
