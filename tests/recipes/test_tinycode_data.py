"""The shipped tokenizer, the held-out list and the benchmark prompts of tinycode."""

import json
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from foretoken.bench.workload import load_prompts
from recipes.tinycode import corpus
from recipes.tinycode.licences import PERMISSIVE, RESTRICTIVE, has_restrictive_header
from recipes.tinycode.prompts import prompts_of
from recipes.tinycode.workload_prompts import edits_of, prose_of

ROOT = Path(__file__).parents[2]
HELD_OUT = (ROOT / "recipes/tinycode/held_out.txt").read_text(encoding="utf-8").split()


def prompts(kind: str) -> list[dict[str, str]]:
    lines = (ROOT / f"foretoken/bench/prompts/tinycode_{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


PROMPTS = prompts("heldout")


@pytest.fixture(scope="module", params=["tinycode", "tinycode-draft"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(ROOT / "models" / request.param)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "def f(x):\n    return x\n",
        "\tif a:\r\n\t\tpass\n\n\n  \n",
        "naïve 日本語 \u200d👩\u200d🚀 עברית \x00\x7f\u0085\u2028",
        bytes(range(256)).decode("latin-1"),
        "x  =  1234567890  # trailing   ",
        "a .b , c ( ' ) n't",
    ],
)
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_vocabulary_and_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == tokenizer.vocab_size == 6144
    assert tokenizer.bos_token == tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    ids = tokenizer("def f():")["input_ids"]
    assert tokenizer.eos_token_id not in ids
    assert tokenizer("<|endoftext|>x")["input_ids"][0] == tokenizer.eos_token_id


def test_an_indentation_is_one_token(tokenizer: PreTrainedTokenizerBase) -> None:
    for width in (4, 8, 12, 16):
        assert len(tokenizer(" " * width)["input_ids"]) == 1


def test_held_out_files_follow_the_rule_and_never_reach_training() -> None:
    assert sorted(set(HELD_OUT)) == HELD_OUT
    assert all(corpus.is_held_out(path) for path in HELD_OUT)  # training takes only paths where this is false
    share = sum(corpus.is_held_out(f"package/module_{i}.py") for i in range(20_000)) / 20_000
    assert 0.007 < share < 0.013


def test_files_like_a_held_out_one_are_dropped_from_training() -> None:
    held = {"a.py": "\n".join(f"result_number_{i} = compute({i})" for i in range(20))}
    changed = held["a.py"].replace("number_1 ", "renamed ").replace(" = ", "=")
    train = {"copy.py": changed, "other.py": "\n".join(f"value_number_{i} = other({i})" for i in range(20))}
    assert corpus.drop_near_held_out(train, held) == ["copy.py"]
    assert list(train) == ["other.py"]


def test_junk_and_licences() -> None:
    assert corpus.junk_reason("T = [" + "0x1234, " * 200 + "]\n") is not None
    assert corpus.junk_reason("def f(x):\n    return x\n" * 20) is None
    assert PERMISSIVE.search("BSD 3 Clause")
    assert PERMISSIVE.search("License :: OSI Approved :: MIT License")
    assert RESTRICTIVE.search("MPL 2.0 AND MIT")
    assert not PERMISSIVE.search("Proprietary")
    assert has_restrictive_header("# under the GNU Lesser General Public License\n")


def test_prompts_come_from_held_out_files() -> None:
    assert len(PROMPTS) >= 64
    assert len({p["id"] for p in PROMPTS}) == len(PROMPTS)
    assert {p["source"] for p in PROMPTS} <= set(HELD_OUT)
    assert max(Counter(p["source"] for p in PROMPTS).values()) <= 2


def test_prompts_have_the_stated_length(tokenizer: PreTrainedTokenizerBase) -> None:
    lengths = [len(tokenizer(p["prompt"])["input_ids"]) for p in PROMPTS]
    assert min(lengths) >= 60
    assert max(lengths) <= 250


def test_a_prompt_leaves_something_to_complete(tokenizer: PreTrainedTokenizerBase) -> None:
    body = "\n".join(f"    step_{i} = transform(value, factor={i})" for i in range(12))
    text = f'def work(value):\n    """Do it."""\n{body}\n    return step_1\n'
    prompts = prompts_of(text, tokenizer)
    assert prompts
    assert all(text.startswith(p) and len(text) - len(p) > 40 for p in prompts)


@pytest.mark.parametrize("kind", ["edit", "prose"])
def test_further_workloads(kind: str) -> None:
    texts = load_prompts(kind)
    assert texts == [record["prompt"] for record in prompts(kind)]
    assert len(set(texts)) == 24
    assert {record["source"] for record in prompts(kind)} <= set(HELD_OUT)
    assert max(Counter(record["source"] for record in prompts(kind)).values()) <= 2


def test_an_edit_repeats_the_function_with_a_name_changed() -> None:
    code = "def f(path, n):\n    a = open(path)\n    for line in a:\n        print(path, line)\n    return n\n"
    assert list(edits_of(code)) == [f"{code.rstrip()}\n\n\ndef f(filename, n):"]
    assert list(edits_of(code.replace("print(path, line)", "pass"))) == []  # too few uses
    assert list(edits_of("def f(:")) == []


def test_prose_ends_within_a_docstring() -> None:
    words = [f"Line {i} says something." for i in range(8)]
    code = 'import os\n\n\ndef f():\n    """' + "\n    ".join(words) + '\n    """\n    return os\n'
    [prompt] = prose_of(code)
    assert prompt.startswith('def f():\n    """Line 0')
    assert prompt.endswith("Line 4 says something.")
