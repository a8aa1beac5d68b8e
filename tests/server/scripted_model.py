"""A real model that writes given texts: a tiny Llama whose every token has one successor, and its tokenizer.

A conversation ends with a token that the chat template chooses by what it is asked, as `<|begin:weather`. The pieces
of that script follow one after the other, then the end of the text. Attention and the feed-forward network give zero:
the embedding of a token alone says, through the head, which one comes next. Other text is read byte by byte.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_MARK = 0xE000  # tells pieces with the same text apart, and is no part of decoded text
_END = "<|end|>"
_BEGINS = tuple("<|begin:"[:length] for length in range(1, 9))  # a piece must not take it from the end of a prompt


def save_scripted_model(
    folder: Path, scripts: Mapping[str, str], template: str, *, special: Sequence[str] = (), plain: Sequence[str] = ()
) -> str:
    """Writes a model and its tokenizer.

    Args:
        folder: For its files.
        scripts: What it writes behind `<|begin:NAME`, by name.
        template: Its chat template.
        special: Markers that are special tokens, which decoding leaves out.
        plain: Markers that are tokens and text.

    Returns:
        The folder.
    """
    tokens, chains = {_END: True}, []
    for name, text in scripts.items():
        chain = [f"<|begin:{name}"]
        tokens[chain[0]] = True
        for token in _pieces(text, [*special, *plain], tokens):
            tokens[token] = token in special
            chain.append(token)
        chains.append([*chain, _END])
    tokenizer = _tokenizer(tokens)
    model = _model(tokenizer.get_vocab_size(), tokenizer.token_to_id(_END))
    with torch.no_grad():
        for chain in chains:
            for before, after in pairwise(map(tokenizer.token_to_id, chain)):
                model.lm_head.weight[after, before] = 4.0
    model.save_pretrained(folder)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, chat_template=template)
    made.save_pretrained(folder)
    return str(folder)


def _tokenizer(tokens: Mapping[str, bool]) -> Tokenizer:
    """Bytes, and tokens of which some are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: id_ for id_, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    unmarked = decoders.Replace(Regex(f"[{chr(_MARK)}-{chr(0xF8FF)}]"), "")
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), unmarked])
    tokenizer.add_tokens(
        [AddedToken(token, special=is_special, normalized=False) for token, is_special in tokens.items()]
    )
    return tokenizer


def _model(vocab_size: int, end: int) -> LlamaForCausalLM:
    """A model whose hidden state is the embedding of the last token, without successors yet."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=-(-vocab_size // 8) * 8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, max_position_embeddings=4096, bos_token_id=None,
        eos_token_id=end, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab_size, config.hidden_size))
        model.lm_head.weight.zero_()
    return model


def _pieces(text: str, markers: Sequence[str], known: Collection[str]) -> list[str]:
    """A text as new tokens: markers the first time, and pieces from three characters on, marked if none is new."""
    made: list[str] = []
    while text:
        fresh = [marker for marker in markers if marker not in known and marker not in made and marker in text]
        end = min(map(text.index, fresh), default=len(text))
        shown = next((marker for marker in fresh if text.startswith(marker)), None)
        if shown is None:
            pieces = [text[:length] for length in range(3, 25) if text[: min(length, end)] == text[:length]]
            new = [piece for piece in pieces or [text[:end]] if piece not in known and piece not in made]
            shown = next((piece for piece in new if piece.isascii() and not piece.endswith(_BEGINS)), None)
        if shown is None:
            shown = text[: min(3, end)]
            made.append(shown + chr(_MARK + len(known) + len(made)))
        else:
            made.append(shown)
        text = text[len(shown) :]
    return made
