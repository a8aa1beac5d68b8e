"""Options that several commands share, alone and in groups, and functions that load the models they name."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import terminal
from foretoken.core.checks import lone_surrogate
from foretoken.core.errors import ConfigError, RequestError
from foretoken.files.atomic_files import check_writable
from foretoken.files.bounded_reads import read_named
from foretoken.models.names import resolve_model

if TYPE_CHECKING:
    from foretoken.bench.workload import Workload
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.entrypoints.config import Setup
    from foretoken.entrypoints.llm import LLM
    from foretoken.models.loaded import LoadedModel
    from foretoken.text.prompt_rows import PromptRow

MODEL_FORMS = (
    "a directory in Hugging Face layout, a GGUF file, a folder with GGUF files (FOLDER:Q4_K_M for one of several), a "
    "hub id (owner/name, owner/name:Q4_K_M), or a name that `foretoken models` lists"
)


def local_path(name: str) -> str:
    """Returns the path of a model on this machine, or the name of a model on the hub; an empty name stays.

    Raises `ModelError` if there is no such model.
    """
    return resolve_model(name, uses_hub=False) if name else name


def directory_of(name: str) -> Path:
    """Returns the local path of a model or head; raises `ModelError` if it cannot be fetched."""
    if Path(name).exists():
        return Path(name)  # importing the hub's client takes half a second
    from foretoken.formats.files import local_head

    return local_head(name, what="model or head")


Model = Annotated[str, typer.Argument(parser=local_path, help=f"Target: {MODEL_FORMS}.")]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="float32, bfloat16, float16, float64, or auto (on CPU bfloat16 for weights in integers, else float32).",
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, another torch device, or auto.")]
_DRAFTER = (
    "METHOD (ngram), METHOD:TREE (ngram:tree), either with :KEY=VALUE after it (hydra:model=DIR, "
    "ngram:num_speculative_tokens=8, hydra:tree=@FILE with JSON), a directory of a head or draft model in place of "
    "METHOD, several of these merged into one tree (ngram+hydra), vLLM's JSON, or @FILE with JSON."
)
drafter_option = partial(typer.Option, "--speculative-config", "-s", metavar="DRAFTER")
Drafter = Annotated[list[str] | None, drafter_option(help=f"{_DRAFTER} Default: none.")]
SyntheticAcceptance = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="Accept drafts at these rates instead of comparing tokens, to measure the speed of a drafter without "
        "trained weights; texts are then not the target's. 0.8,0.7,0.6: P(token k is accepted | all before it are). "
        "One number above 1: the mean acceptance length.",
    ),
]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(help="Largest share of the free memory for KV rows.", rich_help_panel="Batches and memory"),
]
_defaults = partial(typer.Option, rich_help_panel="Sampling where nothing is asked for")
GenerationConfig = Annotated[
    str,
    _defaults(
        metavar="NAME",
        help="Source of the sampling defaults: auto (the model's generation_config.json), vllm (none), or a directory "
        "with such a file.",
    ),
]
OverrideGenerationConfig = Annotated[
    str | None,
    _defaults(metavar="TEXT", help='JSON that overrides those defaults: {"top_k": 20}.'),
]
_OR_THE_MODELS = "Default: the model's, else"
Prompts = Annotated[
    str,
    typer.Option(
        metavar="PATH",
        help="'heldout', 'edit', 'prose' or 'all' (bundled), .jsonl or .jsonl.gz with rows of Spec-Bench, MT-bench, "
        'HumanEval, GSM8K, MBPP, chats or {"prompt": …}, or a text file.',
    ),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Output tokens a prompt.")]
Seed = Annotated[int, typer.Option(help="Seed of the first prompt; the i-th gets seed + i.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
HeldOut = Annotated[str, typer.Option(help="Held-out text for the comparison: a bundled set's name, .jsonl or text.")]
BatchSizes = Annotated[
    list[int] | None, typer.Option(min=1, help="Sequences decoded at once; may be repeated. Default: 1.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own choice when left out.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print the seconds of each stage of the start, and which decoder runs.")
]
Wide = Annotated[bool, typer.Option("--wide", help="Show all columns.")]


@dataclass(frozen=True, kw_only=True)
class DrafterChoice:
    """The drafter of a command that takes one."""

    speculative_config: Drafter = None
    spec_type: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Methods with commas between them, merged into one tree: ngram,hydra is -s ngram+hydra.",
        ),
    ] = None

    @property
    def texts(self) -> list[str] | None:
        """The texts of -s, or the equivalent of --spec-type; None if both are missing.

        Raises `ConfigError` when both are given, or a name between commas is missing.
        """
        if self.spec_type is None:
            return self.speculative_config
        if self.speculative_config:
            raise ConfigError(
                f"--spec-type {self.spec_type} and --speculative-config {self.speculative_config[0]} both name a "
                "drafter. Pass one of them."
            )
        names = [name.strip() for name in self.spec_type.split(",")]
        if not all(names):
            raise ConfigError(
                f"--spec-type is '{self.spec_type}'. Expected names of methods with commas, as ngram,hydra."
            )
        return ["+".join(names)]

    def setup(self, command: str, target: str, advice: str = "To compare several, use `foretoken bench`.") -> Setup:
        """Returns the drafter, or plain decoding if there is none; `advice` says what to do with several drafters.

        Raises `ConfigError` when there are several drafters, one cannot be made, or it needs to know the text.
        """
        from foretoken.entrypoints.config import checked_setup

        texts = self.texts or ["plain"]
        if len(texts) > 1:
            raise ConfigError(f"{command} takes one --speculative-config. {advice}")
        setup = checked_setup(texts[0], target=target)
        if setup.needs_references:
            raise ConfigError("the drafter 'oracle' must know the text beforehand. Use it with `foretoken bench`.")
        if command != "serve":
            check_has_target_text(command, setup)
        return setup


@dataclass(frozen=True, kw_only=True)
class DrafterChoices(DrafterChoice):
    """The drafters of a command that compares them."""

    speculative_config: Annotated[
        list[str] | None, drafter_option(help=f"{_DRAFTER} May be repeated. Default: ngram.")
    ] = None


def with_synthetic_acceptance(setup: Setup, rates: str | None, target: str) -> Setup:
    """Returns a setup with --synthetic-acceptance; raises `ConfigError` if these do not fit together."""
    from foretoken.entrypoints.config import check_setup

    setup = setup.with_synthetic_acceptance(rates)
    check_setup(setup, target=target)
    return setup


def check_has_target_text(command: str, setup: Setup) -> None:
    """Raises `ConfigError` for synthetic acceptance in a command that gives or checks the target's text."""
    if setup.is_synthetic:
        raise ConfigError(
            f"`foretoken {command}` needs the text of the target, which synthetic acceptance does not write. Use "
            "synthetic acceptance with `foretoken bench` or `foretoken serve`."
        )


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a target is loaded and run; the fields are as in `LLM`."""

    dtype: Dtype = "auto"
    device: Device = "auto"
    quantization: Annotated[
        str | None,
        typer.Option(
            "--quantization",
            "-q",
            metavar="NAME",
            help="Quantize the target's matrices at load: int8 (a scale a row) or int4 (a scale for 128 weights); "
            "w8a8 and w4a8 also quantize their inputs to 8 bits; a8 quantizes only the inputs, of weights stored in "
            "integers. CPUs alone. Texts are then those of the quantized model.",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="int8 quantizes keys and values when they are written to the KV cache: about half the memory of "
            "bfloat16, in about the same time. CPUs alone. Texts are then those of the quantized cache. Default: auto.",
        ),
    ] = None
    runner: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="auto (exact where an exact runner fits the model), fastest (by measured cost, exact or not: plain "
            "and speculative text may then differ where two tokens score nearly the same, which `foretoken verify` "
            "explains), lean (as auto, without the transformers model), or one by name: lean-native, lean-graphs, "
            "lean-stock, or generic (the transformers model).",
        ),
    ] = "auto"
    threads: Threads = None

    def load(
        self, model: str, *, unpacks: bool = False, clock: terminal.StartClock | None = None
    ) -> tuple[LoadedModel, Any]:
        """Loads a target and its tokenizer, once for all setups, in a stage of a start.

        `unpacks` is for training, see `unpacked_model`.

        Raises:
            ConfigError: When the machine has far fewer processors than `threads`, or the model is a head.
            ModelError: When the model cannot be loaded, or the device does not exist.
            RequestError: When the model has no tokenizer.
        """
        with (clock or terminal.StartClock()).stage("weights and tokenizer"):
            from foretoken.entrypoints import model_arguments

            use_threads(self.threads)
            return model_arguments.load_target(
                model, dtype=self.dtype, device=self.device, quantization=self.quantization,
                kv_cache_dtype=self.kv_cache_dtype, unpacks=unpacks,
            )  # fmt: skip

    def make_llm(
        self, loaded: LoadedModel, tokenizer: Any, setup: Setup, clock: terminal.StartClock | None = None, *,
        verbose: bool = False, **more: Any,
    ) -> LLM:  # fmt: skip
        """Makes the engine over a loaded target, in a stage of a start if there is a clock; `more` are as in `LLM`.

        `verbose` prints the seconds of each stage, and the choice of the runner.
        """
        from foretoken.entrypoints.llm import LLM

        with nullcontext() if clock is None else clock.stage("runner and drafter", _reading(loaded)):
            llm = LLM(loaded, speculative_config=setup.config, tokenizer=tokenizer, runner=self.runner, **more)
        if clock is not None and verbose:
            clock.print_table()
            terminal.print_note(f"[{llm.target.choice}]")
        return llm


def use_threads(threads: int | None) -> None:
    """Sets the number of CPU threads unless it is None; raises `ConfigError` if there are far fewer processors."""
    if threads is not None:
        from foretoken.core.backend import set_num_threads

        set_num_threads(threads)


def started_clock() -> terminal.StartClock:
    """Begins a start with its first stage, the import of the engine."""
    clock = terminal.StartClock()
    with clock.stage("libraries"):
        import_module("foretoken.entrypoints.llm")
    return clock


def _reading(loaded: LoadedModel) -> Callable[[], str]:
    """Returns a function that describes the weights which are still read while the engine is made."""
    if loaded.bytes_read is None:
        return str
    bytes_read, begin = loaded.bytes_read, time.perf_counter()
    before, total = bytes_read()

    def rest() -> str:
        done, seconds = bytes_read()[0], time.perf_counter() - begin
        pace = (done - before) / max(seconds, 0.1)
        bar = "━" * (20 * done // total)
        told = f", weights {bar:─<20} {done / 1e6:.0f} of {total / 1e6:.0f} MB, {pace / 1e6:.0f} MB/s"
        return told if done < total else ""

    return rest


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The sampling parameters of a command, and the source of their defaults."""

    temperature: Annotated[float | None, typer.Option(help=f"0 for greedy decoding. {_OR_THE_MODELS} 0.")] = None
    top_k: Annotated[
        int | None, typer.Option(help=f"Keep the k most probable tokens; 0 keeps all. {_OR_THE_MODELS} 0.")
    ] = None
    top_p: Annotated[
        float | None, typer.Option(help=f"Keep the smallest set that reaches this probability. {_OR_THE_MODELS} 1.")
    ] = None
    generation_config: GenerationConfig = "auto"
    override_generation_config: OverrideGenerationConfig = None

    def given(self, **more: Any) -> dict[str, Any]:
        """Returns what was asked for, with None for missing options; refuses bad values before anything is loaded."""
        from foretoken.core.sampling_params import SamplingParams

        given = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, **more}
        SamplingParams(**given)
        return given

    def params(self, loaded: LoadedModel, given: Mapping[str, Any], **otherwise: Any) -> SamplingParams:
        """Returns the sampling parameters; prints those that come from the model's defaults.

        Args:
            given: The result of `given`.
            otherwise: Values of options that neither the command line nor the model sets.

        Raises:
            ConfigError: When the source of defaults is invalid.
            ModelError: When the generation configuration cannot be read.
        """
        from foretoken.core.sampling_params import SamplingParams
        from foretoken.entrypoints.model_arguments import sampling_defaults

        asked = {name: value for name, value in given.items() if value is not None}
        defaults = sampling_defaults(loaded, self.generation_config, self.override_generation_config)
        note_sampling({name: value for name, value in defaults.items() if name not in asked})
        return SamplingParams(**{**otherwise, **defaults, **asked})


def note_sampling(defaults: Mapping[str, Any]) -> None:
    """Prints the sampling defaults of the model, if there are any."""
    if defaults:
        told = ", ".join(f"{name} {value}" for name, value in defaults.items())
        terminal.print_note(f"[the model's sampling defaults: {told}]")


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The prompts of a measurement, and how they are continued."""

    prompts: Prompts = "heldout"
    num_prompts: Annotated[int, typer.Option(min=1, help="Use N prompts: of each category in turn the next one.")] = 8
    max_tokens: MaxTokens = 128
    temperature: Annotated[
        list[float] | None, typer.Option(help="Temperature; may be repeated. Default: 0 and 0.8.")
    ] = None

    def rows(self) -> list[PromptRow]:
        """Reads the prompts; raises what `read_prompts` raises."""
        from foretoken.bench.workload import read_prompts

        return read_prompts(self.prompts, limit=self.num_prompts)

    def workload(
        self, rows: Sequence[PromptRow], loaded: LoadedModel, tokenizer: Any, *,
        temperatures: Sequence[float] = (0.0, 0.8), **more: Any,
    ) -> Workload:  # fmt: skip
        """Returns the workload of rows for a target; `temperatures` is the default, `more` are as in `make_workload`.

        Raises `ConfigError` if --max-tokens exceeds the context, `RequestError` as `make_workload` does.
        """
        from foretoken.bench.workload import make_workload

        check_max_tokens(self.max_tokens, loaded)
        asked = self.temperature or temperatures
        return make_workload(rows, loaded, tokenizer, temperatures=asked, max_tokens=self.max_tokens, **more)


def check_max_tokens(max_tokens: int, loaded: LoadedModel) -> None:
    """Raises `ConfigError` if even the shortest prompt leaves no room for `max_tokens` tokens."""
    if max_tokens >= loaded.context_len:
        raise ConfigError(
            f"--max-tokens is {max_tokens}, but '{loaded.name}' has a context of {loaded.context_len} tokens, the "
            f"prompt's included. Expected at most {loaded.context_len - 1}."
        )


def check_new_file(path: Path, what: str, *, force: bool) -> None:
    """Raises `ConfigError` if writing a file would replace a directory, or a file without --force, or is not possible.

    `what` is the option or argument that names the file.
    """
    if path.is_dir():
        raise ConfigError(f"{what} is '{path}', a directory. Expected the name of a file.")
    if path.exists() and not force:
        raise ConfigError(f"'{path}' exists. Expected the name of a new file. Pass --force to replace it.")
    check_writable(path, ConfigError, "Expected a place for a file that may be written to. Name another, or make room.")


def check_absent(path: Path, what: str) -> None:
    """Raises `ConfigError` if anything lies at the path of a new file or directory."""
    if path.exists() or path.is_symlink():
        raise ConfigError(f"'{path}' exists already. Expected a new {what}. Choose another or remove it.")


def command_line() -> str:
    """Returns the command that runs, as a shell takes it."""
    return shlex.join(["foretoken", *sys.argv[1:]])


def run_header(loaded: LoadedModel, **more: Any) -> dict[str, Any]:
    """Returns the conditions of a run, which are printed with every figure; a cost twin names its original."""
    from importlib.metadata import version

    import torch

    from foretoken import __version__

    twin = loaded.cost_twin
    return {
        "model": loaded.name,
        **({} if twin is None else {"cost_twin": twin.label}),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        **({} if loaded.quantization is None else {"quantization": loaded.quantization}),
        **({} if loaded.kv_cache_dtype == "auto" else {"kv_cache_dtype": loaded.kv_cache_dtype}),
        "device": str(loaded.device),
        "threads": torch.get_num_threads(),
        "foretoken": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        **more,
    }


def read_text(file: Path) -> str:
    """Returns the text of a file; raises `RequestError` if it cannot be read, is too large, or is not UTF-8."""
    try:
        return decode(read_named(file), f"'{file}'")
    except OSError as err:
        raise RequestError(f"'{file}' cannot be read: {err.strerror}. Expected a text file.") from err


def checked(text: str, where: str) -> str:
    """Returns an argument as text; raises `RequestError` if its bytes were not UTF-8, which Python marks by surrogates.

    Under an ASCII locale Python marks all other bytes so: this function decodes them.
    """
    at = lone_surrogate(text)
    if at is None:
        return text
    try:
        return os.fsencode(text).decode()
    except UnicodeError as err:
        raise RequestError(f"{where} is not UTF-8 text: character {at} is not a character. Expected UTF-8.") from err


def decode(text: bytes, where: str) -> str:
    """Decodes a user's text without a byte-order mark; raises `RequestError`, with its source, unless it is UTF-8."""
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as err:
        raise RequestError(
            f"{where} is not UTF-8 text: byte {err.start} is {text[err.start]:#04x}. Expected UTF-8. Convert it first."
        ) from err


def print_json(value: Any) -> None:
    """Prints one JSON object on standard output."""
    print(json.dumps(value, indent=2))
