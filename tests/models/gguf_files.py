"""Writes GGUF files with llama.cpp's own package, as its conversion script writes them, from tiny models."""

import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from tiny_models import CONTEXT_LEN, tiny_model
from transformers.convert_slow_tokenizer import bytes_to_unicode

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
TINYCODE = Path(__file__).parents[2] / "models" / "tinycode"
_SIZES = {
    "vocab_size": gguf.GGUFWriter.add_vocab_size,
    "max_position_embeddings": gguf.GGUFWriter.add_context_length,
    "num_hidden_layers": gguf.GGUFWriter.add_block_count,
    "hidden_size": gguf.GGUFWriter.add_embedding_length,
    "intermediate_size": gguf.GGUFWriter.add_feed_forward_length,
    "num_attention_heads": gguf.GGUFWriter.add_head_count,
    "num_key_value_heads": gguf.GGUFWriter.add_head_count_kv,
    "rms_norm_eps": gguf.GGUFWriter.add_layer_norm_rms_eps,
    "norm_epsilon": gguf.GGUFWriter.add_layer_norm_eps,
    "layer_norm_eps": gguf.GGUFWriter.add_layer_norm_eps,
}
_PERMUTED = ("llama", "granite", "smollm3")  # rows that turn together are neighbours
# llama.cpp's names of the architectures that transformers calls something else.
_ARCHITECTURES = {
    "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "cohere": "command-r", "olmo3": "olmo2",
    "gpt_oss": "gpt-oss",
}  # fmt: skip
Add = Callable[[gguf.GGUFWriter], None]


def tiny_file(path: Path, *adds: Add, context: int = CONTEXT_LEN, **kwargs: Any) -> Path:
    """Writes a tiny Llama."""
    sizes = SMALL | {"num_hidden_layers": 1, "max_position_embeddings": context}
    write(path, tiny_model("llama", **sizes), **{"matrices": Type.Q4_0, "tied": True, "adds": adds} | kwargs)
    return path


def written(path: Path, model: Any, **options: Any) -> Any:
    """Writes a model as `write`; returns it with the weights that the file stands for."""
    model.load_state_dict(write(path, model, **options))
    return model


def blocks(weights: np.ndarray, type_: Type, seed: int = 0) -> np.ndarray:
    """The bytes of a matrix: rounded where the package can round, else random numbers below sane scales."""
    try:
        return gguf.quantize(np.ascontiguousarray(weights), type_)
    except NotImplementedError:
        return random_blocks(*weights.shape, type_, seed)


# Where a block has its scales in half precision; 0 unless it is here.
SCALES = dict.fromkeys((Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K), (0, 2)) | {
    Type.Q6_K: (208,), Type.Q3_K: (108,), Type.Q2_K: (80, 82), Type.MXFP4: (), Type.IQ1_M: (),
}  # fmt: skip


def random_blocks(rows: int, cols: int, type_: Type, seed: int = 0) -> np.ndarray:
    """Random bytes with halves near 1 / 1000 where a format has its scales."""
    block, size = gguf.GGML_QUANT_SIZES[type_]
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    halves = (rng.uniform(0.5, 1.5, (2, rows, cols // block, 1)) / 1000).astype(np.float16)
    for at, half in zip(SCALES.get(type_, (0,)), halves, strict=False):
        made[..., at : at + 2] = half.view(np.uint8)
    if type_ == Type.MXFP4:
        made[..., 0] = made[..., 0] % 16 + 112  # powers of 2
    if type_ == Type.IQ1_M:  # four bits in each of four words
        words, bits = made[..., 48:56].view(np.uint16), halves[0].view(np.uint16)
        words[...] = words & 0xFFF | (bits >> np.arange(0, 16, 4, dtype=np.uint16) & 15) << 12
    return made.reshape(rows, -1)


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key matrix of Llama as the conversion script orders them."""
    pairs = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def restored(weights: np.ndarray, heads: int) -> np.ndarray:
    """The opposite of `permuted`, one row after another."""
    size = weights.shape[0] // heads
    order = [head * size + 2 * (row % (size // 2)) + row // (size // 2) for head in range(heads) for row in range(size)]
    return weights[order]


def write(
    path: Path,
    model: Any,
    *,
    matrices: Type | Callable[[str], Type],
    tied: bool = False,
    tokenizer: bool = False,
    values: Mapping[str, Any] | None = None,
    adds: Iterable[Add] = (),
    leave_out: Iterable[str] = (),
    tensors: dict[str, np.ndarray] | None = None,
    joined: dict[str, tuple[str, ...]] | None = None,
    split: int = 0,
) -> dict[str, torch.Tensor]:
    """Writes a model; gives the weights that the file stands for, by their names in transformers.

    Args:
        matrices: The type of all matrices, or of each by its name in transformers.
        tied: Leaves the LM head out.
        values: More of the header by its keys, the architecture's without its name; None leaves one out.
        adds: Add more to the header.
        leave_out: Tensors of the file that are not written.
        tensors: More of them, in float32.
        joined: Tensors of a block that are written as one, row below row, by its name.
        split: Most tensors of a part; 0 for a single file.
    """
    config = model.config
    architecture = _ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    for field, add in _SIZES.items():
        if (value := getattr(config, field, None)) is not None:
            add(writer, value)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if tokenizer:
        add_tokenizer(writer)
    for key, value in (values or {}).items():
        is_whole = key.startswith(("general.", "split.", "tokenizer."))
        replace_value(writer, key if is_whole else f"{architecture}.{key}", value)
    for add in adds:
        add(writer)
    stands_for: dict[str, torch.Tensor] = {}
    made: dict[str, tuple[np.ndarray, Type]] = {}
    own_weights = _split_experts(model.state_dict(), is_interleaved=config.model_type == "gpt_oss")
    for number, ((key, weight), name) in enumerate(
        zip(own_weights.items(), _names(own_weights, config, architecture), strict=True)
    ):
        if key == "lm_head.weight" and tied:
            continue
        is_matrix = weight.ndim > 1 and not key.endswith(("bias", "norm.weight", "router.weight"))
        type_ = Type.F32 if not is_matrix else matrices(key) if callable(matrices) else matrices
        heads = _permuted_heads(key, config) if architecture in _PERMUTED else 0
        offset = int(architecture.startswith("gemma") and key.endswith("norm.weight"))
        weights = permuted(weight.numpy(), heads) if heads else weight.numpy() + offset
        stored = _blocks_of(weights, type_, number) if type_ != Type.F32 else np.ascontiguousarray(weights)
        read = gguf.dequantize(stored, type_)
        stands_for[key] = torch.from_numpy(restored(read, heads) if heads else read - offset)
        if name not in leave_out:
            made[name] = stored, type_
    if tied:
        stands_for["lm_head.weight"] = stands_for["model.embed_tokens.weight"]
    stands_for = _joined_experts(stands_for, is_interleaved=config.model_type == "gpt_oss")
    join_tensors(made, joined or {})
    for name, (stored, type_) in made.items():
        writer.add_tensor(name, stored, raw_dtype=type_)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor)
    _finish(writer)
    return stands_for


def replace_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a value of the type that fits best, in place of one with the same key; None adds none."""
    writer.kv_data[0].pop(key, None)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    if value is not None:
        add.get(type(value), writer.add_string)(key, value)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def join_tensors(made: dict[str, tuple[np.ndarray, Type]], joined: dict[str, tuple[str, ...]]) -> None:
    """Replaces tensors by joined ones in place."""
    for whole, parts in joined.items():
        for name in [each for each in made if f".{parts[0]}." in each]:
            of_parts = [made.pop(name.replace(parts[0], part)) for part in parts]
            axis = -1 if of_parts[0][0].ndim == 1 else -2
            made[name.replace(parts[0], whole)] = np.concatenate([each for each, _ in of_parts], axis), of_parts[0][1]


def _blocks_of(weights: np.ndarray, type_: Type, seed: int) -> np.ndarray:
    """`blocks` of a matrix, or of the matrices of all experts."""
    made = blocks(weights.reshape(-1, weights.shape[-1]), type_, seed)
    return made.reshape(*weights.shape[:-1], -1)


def _split_experts(weights: dict[str, torch.Tensor], *, is_interleaved: bool) -> dict[str, torch.Tensor]:
    """Gate and up of experts apart, as the conversion script has them; `is_interleaved`: their rows take turns."""
    found = {}
    for key, weight in weights.items():
        stem, _, part = key.rpartition(".")
        kind = "bias" if part.endswith("_bias") else "weight"
        own = weight.transpose(1, 2) if is_interleaved and part in ("gate_up_proj", "down_proj") else weight
        if stem.endswith("experts") and part.startswith("gate_up_proj"):
            both = (own[:, ::2], own[:, 1::2]) if is_interleaved else own.chunk(2, 1)
            for name, each in zip(("gate_proj", "up_proj"), both, strict=True):
                found[f"{stem}.{name}.{kind}"] = each.contiguous()
        elif stem.endswith("experts"):
            found[f"{stem}.down_proj.{kind}"] = own.contiguous()
        else:
            found[f"{key}.weight" if part == "sinks" else key] = weight
    return found


def _joined_experts(weights: dict[str, torch.Tensor], *, is_interleaved: bool) -> dict[str, torch.Tensor]:
    found = {}
    for key, weight in weights.items():
        stem, _, kind = key.rpartition(".")
        name = f"{stem}_bias" if kind == "bias" else stem
        if stem.endswith("experts.gate_proj"):
            up = weights[key.replace("gate_proj", "up_proj")]
            both = torch.stack([weight, up], 2).flatten(1, 2) if is_interleaved else torch.cat([weight, up], 1)
            name = name.replace("gate_proj", "gate_up_proj")
            found[name] = both.transpose(1, 2) if is_interleaved and kind == "weight" else both
        elif stem.endswith("experts.down_proj"):
            found[name] = weight.transpose(1, 2) if is_interleaved and kind == "weight" else weight
        elif not stem.endswith("experts.up_proj"):
            found[stem if stem.endswith("sinks") else key] = weight
    return found


def _names(weights: dict[str, torch.Tensor], config: Any, architecture: str) -> list[str]:
    """The names of all weights as llama.cpp's package has them."""
    (number,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found = {key: names.get_name(key, try_suffixes=(".weight", ".bias")) for key in weights}
    assert all(name or key == "lm_head.weight" for key, name in found.items())  # Gemma 2 never has an LM head
    return [name or "output.weight" for name in found.values()]


def _permuted_heads(key: str, config: Any) -> int:
    return config.num_attention_heads * (".q_proj." in key) + config.num_key_value_heads * (".k_proj." in key)


def add_tokenizer(writer: gguf.GGUFWriter, split: str = "gpt-2") -> None:
    """Adds the tokenizer of tinycode, as the conversion script does for byte-level BPE."""
    whole = json.loads((TINYCODE / "tokenizer.json").read_text())
    vocab = whole["model"]["vocab"]
    special = {token["content"] for token in whole["added_tokens"] if token["special"]}
    tokens = sorted(vocab, key=vocab.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in whole["model"]["merges"]]
    )
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)


def write_header(path: Path, *adds: Add, architecture: str = "llama") -> Path:
    """Writes a file without tensors: enough for a tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    for add in adds:
        add(writer)
    _finish(writer)
    return path


def add_tokens(
    writer: gguf.GGUFWriter,
    tokens: Iterable[str],
    *,
    special: dict[str, int] | None = None,
    merges: Iterable[str] = (),
    split: str | None = "gpt-2",
    model: str = "gpt2",
    scores: Iterable[float] | None = None,
) -> None:
    """Adds a vocabulary: ordinary `tokens`, then `special` ones with their types."""
    special = special or {}
    whole = [*tokens, *special]
    writer.add_tokenizer_model(model)
    if split is not None:
        writer.add_tokenizer_pre(split)
    writer.add_token_list(whole)
    writer.add_token_types([special.get(token, gguf.TokenType.NORMAL) for token in whole])
    if scores is not None:
        writer.add_token_scores([*scores, *(0.0 for _ in special)])
    if model != "llama":
        writer.add_token_merges(list(merges))


def add_pairs(writer: gguf.GGUFWriter, texts: Iterable[str], split: str) -> None:
    """Adds bytes, and a merge of every pair of bytes in texts: where a text is split shows in all ids up to there.

    Three words are tokens that no merges make.
    """
    characters = bytes_to_unicode()
    spelled = ["".join(characters[byte] for byte in text.encode()) for text in texts]
    pairs = sorted({(text[at], text[at + 1]) for text in spelled for at in range(len(text) - 1)})
    random.Random(0).shuffle(pairs)
    if ("\u0120", "\u0120") in pairs:
        pairs.append(("\u0120\u0120", "\u0120"))
    tokens = [*characters.values(), *map("".join, pairs), "don", "1234", "\u0120e\u0120\u0120"]
    control = {"<|endoftext|>": gguf.TokenType.CONTROL}
    add_tokens(writer, tokens, special=control, merges=[" ".join(pair) for pair in pairs], split=split)
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens))
