"""Scripts in the shape of vLLM's offline examples, with `foretoken` where these have `vllm`, and what they print.

Their imports, arguments and calls are those of the examples in vLLM's repository; the texts and the model are ours.
"""

import ast
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "vllm_scripts"
TEMPLATE = "{% for each in messages %}# {{ each.role }}: {{ each.content }}\n{% endfor %}"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a script as `python SCRIPT ARGUMENTS` does, and gives what it prints and its module."""

    def run(name: str, *arguments: str) -> tuple[str, dict[str, Any]]:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        module = runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out, module

    return run


def printed(text: str, label: str) -> list[Any]:
    """The values after a label, one a line."""
    return [ast.literal_eval(found) for found in re.findall(rf"^{re.escape(label)}: (.*)$", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(ROOT / "models" / "tinycode")


def test_every_script_is_run() -> None:
    names = re.findall(r'run\(\s*"(\w+)"', Path(__file__).read_text(encoding="utf-8"))
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(names)


def test_basic(run: Any, plain: LLM) -> None:
    text, script = run("basic")
    assert printed(text, "Prompt") == script["prompts"]
    expected = plain.generate(script["prompts"], script["sampling_params"])
    assert printed(text, "Output") == [output.outputs[0].text for output in expected]
    num_tokens = sum(len(output.outputs[0].token_ids) for output in expected)
    assert f"vllm:generation_tokens (counter) = {num_tokens}\n" in text
    assert "vllm:num_requests_running (gauge) = 0\n" in text


def test_chat(run: Any, plain: LLM, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    line = ["--temperature", "0", "--max-tokens", "12", "--chat-template-path", str(template)]
    text, _ = run("chat", *line, "--max-model-len", "256", "--tensor-parallel-size", "1", "--enforce-eager")
    prompts, outputs = printed(text, "Prompt"), printed(text, "Output")
    assert len(prompts) == len(outputs) == 11
    assert len(set(prompts)) == 1
    assert prompts[0].endswith("# assistant: class Queue:\n# user: And its method push?\n")
    expected = plain.generate(prompts[0], SamplingParams(temperature=0.0, max_tokens=12))[0].outputs[0].text
    assert set(outputs) == {expected}


def test_structured_outputs(run: Any) -> None:
    text, script = run("structured_outputs")
    assert printed(text, "choice")[0] in script["CHOICES"]
    assert re.fullmatch(script["REGEX"], printed(text, "regex")[0])
    script["Entry"].model_validate(json.loads(printed(text, "json")[0]))
    column = "(name|size) "
    assert re.fullmatch(f"SELECT {column} from (files|users)  where {column}= [12] ", printed(text, "grammar")[0])


@pytest.mark.parametrize(
    ("method", "drafter"), [("ngram", ""), ("eagle", "tinycode-eagle"), ("draft_model", "tinycode-draft")]
)
def test_spec_decode(method: str, drafter: str, run: Any, plain: LLM) -> None:
    text, script = run(
        "spec_decode", "--method", method, "--num-spec-tokens", "3", "--drafter-dir", f"models/{drafter}"
    )
    expected = plain.generate(script["TEXTS"], SamplingParams(temperature=0.0, max_tokens=48))
    assert printed(text, "generated text") == [output.outputs[0].text for output in expected]
    (num_tokens,), (num_drafts,) = printed(text, "total_num_output_tokens"), printed(text, "num_drafts")
    (num_drafted,), (num_accepted,) = printed(text, "num_draft_tokens"), printed(text, "num_accepted_tokens")
    assert num_tokens == sum(len(output.outputs[0].token_ids) for output in expected)
    assert 0 < num_accepted < num_drafted
    assert 0 < num_drafts <= num_tokens - num_accepted
    assert printed(text, "mean acceptance length") == [pytest.approx(1 + num_accepted / num_drafts, abs=1e-4)]
    rates = [printed(text, f"acceptance at token {i}")[0] for i in range(3)]
    assert rates == sorted(rates, reverse=True)
    assert sum(rates) * num_drafts == pytest.approx(num_accepted, abs=0.1)


def test_prefix_caching(run: Any, plain: LLM) -> None:
    text, script = run("prefix_caching")
    assert "Generated answers are the same: True" in text
    shared = len(plain.encode(script["prefix"]))
    cached = [int(count) for count in re.findall(r"^(\d+) of \d+ tokens were not read again$", text, re.MULTILINE)]
    assert len(cached) == 4
    assert min(cached) >= shared - 1


def test_async_llm_streaming(run: Any, plain: LLM) -> None:
    text, _ = run("async_llm_streaming")
    parts = text.split("Generation complete!\n")
    assert parts.pop() == ""
    params = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=42)
    for part in parts:
        (prompt,), new = printed(part, "Prompt"), printed(part, "New")
        assert "".join(new) == plain.generate(prompt, params)[0].outputs[0].text
        assert len(new) > 1
    assert len(parts) == 3
