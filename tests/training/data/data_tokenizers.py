"""A tokenizer of single letters and chat markers whose ids a test can write down, and templates with the two masks.

Letters a..z are 10..35, the space 36, the newline 37, digits 40..49; `^` comes first in every text encoded as text.
"""

from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, USER, ASSISTANT, SYSTEM, END = 1, 2, 3, 4, 5, 6
_MARKERS = {"<pad>": 0, "<s>": BOS, "</s>": EOS, "<u>": USER, "<a>": ASSISTANT, "<y>": SYSTEM, "<e>": END}
SPACE, NEWLINE = 36, 37

# Prints BOS itself: encoded with special tokens it would be there twice.
PREFIX_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ {'user': '<u>', 'assistant': '<a>', 'system': '<y>', 'tool': '<u>'}[m.role] }}{{ m.content }}"
    "{{ '</s>' if m.role == 'assistant' else '<e>' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
MASK_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<a>"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}<u>{{ m.content }}<e>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
# Drops what stands before a dash in all assistant turns but the last, as reasoning templates do.
REWRITING_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<a>"
    "{{ m.content if loop.last else m.content.split('-')[-1] }}</s>"
    "{% else %}<u>{{ m.content }}<e>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def letters(text: str) -> list[int]:
    """Ids of letters, spaces, newlines and digits."""
    return [_id(character) for character in text]


def _id(character: str) -> int:
    return {" ": SPACE, "\n": NEWLINE, "-": 38}.get(
        character, ord(character) - 87 if character >= "a" else ord(character) - 8
    )


def letter_tokenizer(template: str | None = None, *, bos: bool = True, eos: bool = True) -> Any:
    """The tokenizer; with `bos` it writes `<s>` before every text that is not rendered by a template."""
    vocabulary = {character: _id(character) for character in "abcdefghijklmnopqrstuvwxyz \n-0123456789"}
    inner = Tokenizer(models.WordLevel(vocabulary | _MARKERS, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>" if eos else None, pad_token="<pad>",
        additional_special_tokens=["<u>", "<a>", "<y>", "<e>", "</s>"],
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer
