"""The commands do what they say, on the bundled model, on real weights.

Slow because every command loads the bundled model.
"""

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from command_line import MODEL, done, output_of, report_of, run_main, run_process

import foretoken.runner.costs as costs_module
from foretoken.bench import compare  # binds `measure_costs` when it is imported: not while that is replaced
from foretoken.decoder.library import native_library
from foretoken.runner.costs import CostCurve, PassCosts

PROMPT = "def read_lines(path):\n"


def generated(*arguments: str) -> dict[str, Any]:
    return report_of("generate", MODEL, "-p", PROMPT, "--max-tokens", "24", *arguments)


WITHOUT = """
import atexit
@atexit.register
def check():
    found = {names} & set(sys.modules)
    sys.stderr.write(f"imported: {{sorted(found)}}" if found else "imported nothing")
"""


@pytest.mark.slow
def test_commands_of_the_base_package_need_no_extra() -> None:
    """Every command is loaded before one runs, also where the packages of the extras are not installed."""
    extras = (
        "accelerate", "datasets", "fastapi", "httpx", "llguidance", "matplotlib", "peft", "prometheus_client",
        "pyarrow", "ray", "starlette", "tensorboard", "triton", "uvicorn",
    )  # fmt: skip
    arguments = ("generate", MODEL, "-s", "ngram", "--prompt", PROMPT, "--max-tokens", "4")
    ended = run_main(f"sys.modules.update(dict.fromkeys({extras}))", *arguments)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "rounding",
    [
        pytest.param({"quantization": "int4"}, marks=pytest.mark.slow),
        {"quantization": "int8", "kv_cache_dtype": "int8"},
    ],
)
def test_rounded_targets(rounding: dict[str, str]) -> None:
    """Of the trained model: the text is the same with drafts, heads of the original draft well, verify agrees."""
    named = [(f"--{name.replace('_', '-')}", value) for name, value in rounding.items()]
    options = (*chain(*named), "--dtype", "bfloat16", "--runner", "lean-native")
    plain = generated(*options)
    drafted = generated(*options, "-s", "hass:chain:num_speculative_tokens=4")
    assert {name: plain.get(name) for name in rounding} == rounding
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["metrics"]["mean_acceptance_length"] > 1.8
    checked = report_of("verify", MODEL, *options, "-s", "draft_model:tree", "--num-prompts", "2", "--max-tokens", "16")
    assert [row["divergence"] for row in checked["checks"]] == [None] * 4, "two texts at two temperatures"


@pytest.mark.parametrize(
    "config",
    [
        "ngram:tree",
        "draft_model:tree",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("ngram", "draft_model:chain")),
    ],
)
def test_generate_json_is_the_same_with_every_drafter(config: str) -> None:
    plain = generated()
    assert plain["runner"] in ("lean-native", "lean-stock")
    assert len(plain["token_ids"]) == plain["metrics"]["num_emitted"] == 24
    drafted = generated("-s", config)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["text"] == plain["text"]
    assert drafted["metrics"]["steps"] <= 24


def test_generate_with_the_generic_decoder() -> None:
    assert generated("--runner", "generic")["runner"] == "generic"


def test_generate_sampled_is_reproducible() -> None:
    plain = generated("--temperature", "0.8", "--seed", "5")
    assert generated("--temperature", "0.8", "--seed", "5", "-s", "draft_model")["text"] == plain["text"]
    assert generated("--temperature", "0.8", "--seed", "6")["text"] != plain["text"]


def test_generate_streams_the_whole_text(tmp_path: Path) -> None:
    file = tmp_path / "prompt.py"
    file.write_text(PROMPT)
    text = output_of("generate", MODEL, "-f", str(file), "--max-tokens", "24", "-s", "ngram")
    assert text == PROMPT + str(generated()["text"]) + "\n"
    assert output_of("generate", MODEL, "--max-tokens", "24", stdin=PROMPT) == text


def test_verify_and_its_exit_code() -> None:
    arguments = ["verify", MODEL, "-s", "ngram", "-s", "draft_model:tree", "--num-prompts", "2", "--max-tokens", "8"]
    report = report_of(*arguments, "--batch-size", "2")
    assert [check["verdict"] for check in report["checks"]] == ["identical"] * 8  # 2 setups, 2 temperatures, 2 prompts
    assert all(check["runner_choice"].startswith(f"{check['runner']} is used: ") for check in report["checks"])
    assert "identical" in output_of(*arguments, "--num-prompts", "1", "--max-tokens", "4")


def test_bench_reports_every_setup() -> None:
    arguments = ("-s", "ngram", "-s", "draft_model", "--num-prompts", "2", "--max-tokens", "8")
    rows = report_of("bench", MODEL, *arguments)["measurements"]
    names = ["plain", "ngram", "draft_model"]
    assert [(row["setup"], row["temperature"]) for row in rows] == [(name, t) for t in (0.0, 0.8) for name in names]
    for row in rows:
        assert row["num_identical"] in (None, 2)
        assert row["runner_choice"].startswith(f"{row['runner']} is used: ")
        assert abs(row["efficiency"] * row["mean_acceptance_length"] - row["speed_up"]) < 1e-9
        assert abs(sum(row["shares"].values()) - 1) < 1e-6


def test_bench_measures_the_engine_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle at fixed acceptance, and the cost of passes by width."""
    oracle = json.dumps({"method": "oracle", "pattern": [3], "num_speculative_tokens": 6})
    arguments = ("-s", oracle, "--num-prompts", "2", "--max-tokens", "17", "--temperature", "0.8", "--cost-curve")
    report = report_of("bench", MODEL, *arguments)
    plain, row = report["measurements"]
    assert row["num_identical"] == 2
    assert row["mean_acceptance_length"] == 4.0
    assert min(plain["host_ms"], plain["verify_ms"], row["host_ms"], row["verify_ms"]) > 0
    costs = report["verify_cost"]
    assert (costs[0]["width"], costs[-1]["width"]) == (1, 128)
    # Measured once; they are printed as they are.
    monkeypatch.setattr(compare, "verify_costs", lambda *_: [(cost["width"], cost["seconds"]) for cost in costs])
    assert "what a target pass costs" in output_of(
        "bench", MODEL, *arguments, "--num-prompts", "1", "--max-tokens", "4"
    )


@pytest.mark.parametrize(
    "directory",
    [
        "models/tinycode-hydra",
        *(pytest.param(each, marks=pytest.mark.slow) for each in (MODEL, "models/tinycode-medusa")),
    ],
)
def test_inspect_needs_no_torch(directory: str) -> None:
    ended = run_main(WITHOUT.format(names={"torch", "transformers"}), "inspect", directory, "--json")
    assert (ended.returncode, ended.stderr) == (0, "imported nothing")
    assert json.loads(ended.stdout)["directory"] == directory


def test_generate_says_what_loading_took_and_why_it_does_not_draft() -> None:
    arguments = ("generate", MODEL, "-p", PROMPT, "--max-tokens", "40", "-s", "draft_model")
    result = done(*arguments, "--verbose")
    stages = ("Python and command", "libraries", "weights and tokenizer", "runner and drafter")
    assert re.search("".join(rf" {stage} +[\d.]+\n" for stage in (*stages, "all")), result.stderr)
    metrics = report_of(*arguments)
    assert metrics["load_seconds"].keys() == set(stages)
    # Whether drafts pay is the machine's to say; the line is there whenever the engine did not draft.
    skipped = re.search(r"\[did not draft in (\d+) of (\d+) passes: a pass of \d+ tokens costs [\d.]+x", result.stderr)
    passes = re.search(r"in (\d+) target passes", result.stderr)
    assert passes is not None
    assert skipped is None or 0 < int(skipped[1]) <= int(skipped[2]) == int(passes[1]) - 1  # and one of prefill
    said = re.search(r"\[(take|do not draft|not decided)\b.* for 39 tokens after the first.*\]\n(.*)\n$", result.stderr)
    assert said is not None
    assert said[2].startswith(f"[next: `foretoken bench {MODEL} -s draft_model` measures ")
    stages = (metrics["metrics"][f"{stage}_seconds"] for stage in ("draft", "verify", "accept", "commit"))
    assert metrics["verdict"]["seconds"] == pytest.approx(sum(stages))


def test_generate_says_which_decoder_is_used_and_why_passes_were_not_drafted_for() -> None:
    arguments = ("generate", MODEL, "-p", PROMPT, "--max-tokens", "24", "--runner", "lean-stock")
    config = ("-s", "ngram:num_speculative_tokens=4")
    assert "lean-stock is used: it was asked for" in done(*arguments, "-v").stderr
    plain = report_of(*arguments)
    assert (plain["runner_choice"], plain["not_drafted"]) == ("lean-stock is used: it was asked for", None)
    report = report_of(*arguments, *config)
    passes = report["not_drafted"]["passes"]
    assert passes["found nothing"] > 0  # the prompt repeats nothing at first
    assert passes.keys() <= {"found nothing", "not asked"}
    said = re.search(r"\[nothing drafted in (\d+) of (\d+) passes: (.*)\]", done(*arguments, *config, "-v").stderr)
    assert said is not None
    assert (int(said[1]), int(said[2])) == (sum(passes.values()), report["metrics"]["steps"])
    assert {part.rpartition(" in ")[0]: int(part.rpartition(" in ")[2]) for part in said[3].split(", ")} == passes


def test_generate_says_that_a_drafter_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "from foretoken.drafters.base import DrafterOptions as Options, TargetReads",
        "class Broken:",
        "    name, reads, nodes_by_depth = 'broken', TargetReads(), [1, 2]",
        "    attach = begin = commit = release = lambda self, *arguments: None",
        "    def propose(self, context): raise ValueError('no idea')",
        "def create(options): return Broken()",
    ]
    (tmp_path / "failing").mkdir()
    (tmp_path / "failing" / "drafter.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ("generate", MODEL, "-p", PROMPT, "--max-tokens", "8", "-s", "failing.drafter:num_speculative_tokens=1")
    report = report_of(*arguments)["not_drafted"]
    # After five failures in a row the drafter is switched off, and nobody is asked.
    assert report == {"passes": {"failed": 5, "not asked": 2}, "declined": None, "draft_error": "ValueError: no idea"}
    assert "failed in 5, not asked in 2; the last failure: ValueError: no idea]" in done(*arguments, "-v").stderr


def test_a_text_cut_by_the_context_says_so() -> None:
    prompt = "value = 1\n" * 180
    result = done("generate", MODEL, "--max-tokens", "200", "--ignore-eos", stdin=prompt)
    assert "ended by the context of 1024 tokens]" in result.stderr


def test_version_and_no_command() -> None:
    assert output_of("--version") == output_of("version")
    assert "generate" in output_of()
    assert "--install-completion" in output_of("--help")


def test_inspect() -> None:
    facts = report_of("inspect", MODEL)
    assert (facts["architecture"], facts["vocabulary"], facts["has_tokenizer"]) == ("LlamaForCausalLM", 6144, True)
    assert facts["can_be_target"].startswith("yes")


def test_costs_are_measured_anew_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[str] = []

    def instantly(model: Any, decoder: str) -> PassCosts:
        measured.append(decoder)
        return PassCosts(*[CostCurve((1,), (0.5,))] * 3)

    native_library()  # not to be compiled anew for an empty cache
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setattr(costs_module, "measure_costs", instantly)
    arguments = ("bench", MODEL, "-s", "draft_model", "--num-prompts", "1", "--max-tokens", "2", "--temperature", "0")
    for expected, more in ((1, ()), (1, ()), (2, ("--refresh-costs",))):
        output_of(*arguments, *more)
        assert len(measured) == expected


def test_the_bundled_models_are_listed_with_their_draft_models() -> None:
    found = {each["name"]: each for each in report_of("models")["models"]}
    draft = found["models/tinycode-draft"]
    assert draft["drafts_for"][MODEL] == draft["num_bytes"] / found[MODEL]["num_bytes"]
    assert draft["format"] == "safetensors BF16"
    shown = output_of("models")
    assert "models/tinycode-draft drafts for models/tinycode (15% of its bytes)" in shown
    assert "models/tinycode-hydra" not in shown  # a head


def test_neither_the_list_nor_a_mistyped_name_needs_torch() -> None:
    code = (
        "import sys; from foretoken.cli.main import main\n"
        "for sys.argv[1:] in (['models'], ['generate', 'models/tinycod', '-p', 'x']):\n"
        "    try: main()\n"
        "    except SystemExit as end: print(end.code)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    done = run_process("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2"
    assert "Did you mean 'models/tinycode'?" in done.stderr
