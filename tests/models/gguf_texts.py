"""Texts that tokenizers split in different ways; the recorded ids of llama.cpp are of these texts, in this order."""

import random

_SPACES = ["", *(" " * count for count in range(1, 9)), "\n", "\n\n x", "\r\n", "a\r\nb\rc", "\t\tx", " \n \t y"]
_OTHER_SPACES = [f"a{space}b{space}{space}c" for space in ("\u00a0", "\u3000", "\u0085", "\u2028", "\u200b")]
_NUMBERS = [*("1234567"[:count] for count in range(1, 8)), "1,234.56", "  42", "x2y33", "٣४५", "²½", "0x1F 1e-5"]
_WORDS = [
    "don't DON'T Don't we'Ll I'Ve he'd",
    "'s 'T 're",
    "e\u0301tude",
    "हिन्दी",
    "語Ωμέγα",
    "iPhone HTTPServer",
    "Straße",
]
_SCRIPTS = [
    *("カタカナ ひらがな 漢字", "한국어 문장", "ภาษาไทย", "Привет, мир!", "مرحبا بالعالم", "שלום"),
    *("\ufb01 \u212b \u00c5 \u2167", "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea"),
]
_CODE = [
    *("def add(a, b):\n    return a + b  # 12345\n", "for (int i=0;i<10;++i){\n\tx[i]+=i;\n}", "<a href='x'>y</a>"),
    *("{}[]()!?;:", "x = {'a': [1, 2], \"b\": None}\n\n\n", "$HOME/.cache ~/x_y-z", "#include <stdio.h>\n"),
    *("a+=1;//c", "\\n\\t", "``` `x` ```"),
]
_SPECIALS = [
    *("</s>", "<s>", "<unk>", "<pad>", "<bos>", "<eos>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>"),
    *("<end_of_turn>", "<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<reponame>"),
    *("<start_of_turn>", "<|eot_id|>", "<tool_call>"),
]
_AMONG = [
    *("<|end|>\nfoo", "a</s>b", " </s> </s>", "<|im_start|>user\nHi<|im_end|>\n", "</s></s>", "<| im_end|>"),
    *("<0x0A>", "\u2581a \u2581"),
]
_PARTS = [
    *_WORDS,
    *_SCRIPTS,
    *_CODE,
    *_NUMBERS,
    "\n",
    "\n\n",
    " ",
    "  ",
    "   ",
    "\t",
    "\r\n",
    ".",
    ", ",
    "'s",
    "The fox",
]

# Every kind of text once, in few tokens: for many expressions.
SHORT_TEXTS = [
    *(
        "don't DON'T we'Ll I'Ve 's",
        "a  b   c\n\n  d \r\n\t e  ",
        "1 12 123 1234 12345678",
        "x2y33 $4.56 ٣४५²½",
        "{}[]();//\n\n",
    ),
    *("#include <a_b.h>\n", "`~|^$+ x.y/z", "e\u0301tude हिन्दी", "語カな 한국!\u3002", "Straße мир", "a\u00a0b\u3000c"),
    *(
        " </s> <|endoftext|> x",
        " " * 22 + "x",
        "a" + "\n" * 5 + "b",
        "x'sabc don'tell's It'S",
        ".\n/ \n//\n(/",
        "5\u0301x \u0301a",
    ),
    *(
        "(\u00e9t\u00e9)_a1 +b\u0301 \u4e00a\u4e00\u4e01",
        "a\u00a9\u00aeb \u00b7\u00b7c",
        "1,234,567 12345.678 \u0663\u0664\u0665\u0666",
    ),
]


def texts() -> list[str]:
    """Returns 1,000 texts: single cases, then mixes of them from a seed."""
    found = [*_SPACES, *_OTHER_SPACES, *_NUMBERS, *_WORDS, *_SCRIPTS, *_CODE, *_SPECIALS, *_AMONG]
    chosen = random.Random(51)
    while len(found) < 1000:
        parts = [chosen.choice(_SPECIALS if chosen.random() < 0.1 else _PARTS) for _ in range(chosen.randint(2, 5))]
        found.append(chosen.choice(["", " "]).join(parts))
    return found
