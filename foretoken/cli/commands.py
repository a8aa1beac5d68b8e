"""The commands of `foretoken` by name, and the options before a command."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from foretoken.cli import (
    batch,
    bench,
    chat,
    data,
    generate,
    heads,
    models,
    options,
    plan,
    quantize,
    serve,
    sweep,
    train,
    twin,
    verify,
)
from foretoken.core.checks import check_range
from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.models.names import resolve_model

_VALUES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
_DIRECTORIES = {"model", "target", "init"}  # text options that name a directory or a hub id
_INTEGERS = (1 - 2**31, 2**31 - 1)
_NUMBERS = (0.0, 1e100)  # a choice: of no option is a larger number useful, or a negative one
# The least and the largest number of other options, by name. Those of batches and machines are choices.
_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("seed", "kv_cache_memory_bytes"), (1 - 2**63, 2**63 - 1)),
    **dict.fromkeys(("batch_size", "max_num_seqs"), (1, 2**16)),
    **dict.fromkeys(("top_p", "min_p", "gpu_memory_utilization", "held_out_fraction"), (0, 1)),
    **dict.fromkeys(("bandwidth", "flops", "memory"), (1e-3, 1e9)),
    "temperature": (0, 100),
    "host_ms": (0, 1e6),
}


class Command(TyperCommand):
    """A command with `N`, `TEXT` or `PATH` for values in its help, and names in capitals for arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See typer; joins the lines of a help paragraph, which are then wrapped to the terminal's width."""
        super().__init__(*args, **kwargs)
        self.help = joined(self.help or "")
        callback = self.callback
        callback = getattr(callback, "__wrapped__", callback)
        hints = typing.get_type_hints(callback)
        whole = typing.get_type_hints(callback, include_extras=True)
        self._models = [name for name, hint in whole.items() if _names_model(hint)]
        for param in self.params:
            is_argument = param.param_type_name == "argument"
            if param.metavar is None and param.name in hints:
                param.metavar = param.name.upper() if is_argument else _value(hints[param.name])
            if is_argument:  # the argument's name stands there; newer versions of typer add a type
                vars(param)["display_type_rich"] = _no_type

    def get_params(self, ctx: Any) -> list[Any]:
        """See click."""
        return without_flags(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click; refuses an empty path, which `Path` reads as the current directory, and numbers out of range."""
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        rest = super().parse_args(ctx, args)
        for param in self.params:
            name = param.metavar if param.param_type_name == "argument" else max(param.opts, key=len)
            is_name = param.param_type_name == "argument" or param.metavar == "PATH" or param.name in _DIRECTORIES
            if is_name and "" in _values(given.get(param.name)):
                raise ConfigError(f"{name} is empty. Expected a name; . is this directory.")
            for value in _values(ctx.params.get(param.name)):
                if isinstance(value, int | float) and not isinstance(value, bool):
                    usual = _INTEGERS if isinstance(value, int) else _NUMBERS
                    check_range(str(name), value, *_BOUNDS.get(param.name, usual), error=ConfigError)
        return rest

    def invoke(self, ctx: Any) -> Any:
        """See click; asks the hub for models that are not on this machine, before anything heavy is imported."""
        for name in self._models:
            if ctx.params.get(name):
                ctx.params[name] = resolve_model(ctx.params[name])
        return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """See click; hides other names of an option, and of a switch's other side, unless the text mentions them."""
        named = [(param, param.opts, param.secondary_opts) for param in self.params]
        try:
            for param, opts, others in named:
                text = getattr(param, "help", None) or ""
                param.opts = [opts[0], *(each for each in opts[1:] if each not in text)]
                param.secondary_opts = [each for each in others if each not in text]
            super().format_help(ctx, formatter)
        finally:
            for param, opts, others in named:
                param.opts, param.secondary_opts = opts, others

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Returns the usage line's parts: `[OPTIONS] MODEL [HEAD]`."""
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        names = [str(param.metavar) if param.required else f"[{param.metavar}]" for param in arguments]
        return [self.options_metavar or "", *names]


class VllmCommand(Command):
    """A command that `vllm` has too: takes vLLM's options at neutral values and refuses other values."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """See click."""
        from foretoken.entrypoints.vllm_arguments import without_other_options

        own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        return super().parse_args(ctx, without_other_options(args, own))


def _names_model(hint: Any) -> bool:
    """Decides whether a parameter is the name of a model, which `local_place` reads."""
    return any(getattr(each, "parser", None) is options.local_place for each in getattr(hint, "__metadata__", ()))


def _no_type(ctx: Any) -> None:  # typer passes `ctx` by name
    del ctx


def without_flags(params: list[Any]) -> list[Any]:
    """Removes the values of switches from the help of options. Changes the options."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def joined(text: str) -> str:
    """Joins the lines of every paragraph."""
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text))


def ending(*examples: str, found: str | None = None) -> str:
    """Returns the end of a command's help; `found` says what exit code 1 means, for commands that give verdicts."""
    verdict = f", 1 {found}" if found else ""
    codes = f"Exit codes: 0 done{verdict}, 2 wrong input or a system error, 130 Ctrl-C."
    lines = "\n".join(f"  {example}" for example in examples)
    return f"Examples:\n{lines}\n\n{codes}" if examples else codes


def _values(given: Any) -> Sequence[Any]:
    return given if isinstance(given, list | tuple) else [given]


def _value(kind: Any) -> str:
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    if parts:
        return _value(parts[0])
    return "" if kind is bool else _VALUES[kind]


class Ended(Exception):
    """A signal or a closed pipe ended a command; code: the exit code, 128 + the signal's number."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Commands(TyperGroup):
    """Runs a command by a name of one or two words: `data vocab` beside `data`, `bench serve` beside `bench`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return without_flags(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = " ".join(args[:2])
        if len(args) > 1 and name in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Raises `Ended` after Ctrl-C or a closed pipe, and `ForetokenError` if the system refuses a file operation."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as err:
            raise Ended(130) from err
        except BrokenPipeError as err:
            raise Ended(141) from err
        except OSError as err:
            raise ForetokenError(system_error(err)) from err


app = typer.Typer(
    name="foretoken",
    help="Speculative decoding for Hugging Face causal LMs and GGUF files, provably lossless.",
    cls=_Commands,
    pretty_exceptions_enable=False,
)
_COMMANDS: tuple[tuple[str, Callable[..., None], str], ...] = (
    ("generate", generate.generate, ending(
        "foretoken generate models/tinycode -p 'class Queue:'",
        "foretoken generate models/tinycode -f prompt.txt -s ngram --temperature 0.8",
        "foretoken generate models/tinycode -p 'class Queue:' \\",
        "    -s ngram:num_speculative_tokens=8",
        "foretoken generate models/tinycode -p 'class Queue:' -s ngram+hydra --show \\",
        "    --trace runs/queue.jsonl",
    )),
    ("chat", chat.chat, ending(
        "foretoken chat model.gguf -s draft_model:model=small.gguf",
        "foretoken chat model.gguf -s suffix --system 'Answer in one sentence.'",
    )),
    ("serve", serve.serve, ending(
        "foretoken serve models/tinycode -s ngram",
        "foretoken serve Qwen/Qwen3-0.6B -s ngram --host 0.0.0.0 --api-key-file keys",
        found="the engine failed",
    )),
    ("batch", batch.batch, ending(
        "foretoken batch in.jsonl out.jsonl --model models/tinycode -s ngram",
        "foretoken batch in.jsonl out.jsonl --model Qwen/Qwen3-0.6B --max-num-seqs 16",
    )),
    ("report", generate.report, ending(
        "foretoken report runs/queue.jsonl",
        "foretoken report runs/queue.jsonl --out runs/page.html",
    )),
    ("verify", verify.verify, ending(
        "foretoken verify models/tinycode -s ngram -s draft_model:tree",
        "foretoken verify models/tinycode -s hydra --batch-size 1 --batch-size 3",
        found="some text differs by more than rounding",
    )),
    ("bench", bench.bench, ending(
        "foretoken bench models/tinycode -s ngram -s draft_model --temperature 0.8",
        "foretoken bench models/tinycode -s ngram:num_speculative_tokens=8 --wide",
        "foretoken bench models/tinycode -s hydra --synthetic-acceptance 0.8,0.7",
    )),
    ("bench serve", bench.bench_serve, ending(
        "foretoken bench serve --base-url http://127.0.0.1:8000 --max-concurrency 16",
        "foretoken bench serve --endpoint chat --request-rate 4 --num-prompts 200 \\",
        "    --save-result runs/load.json",
        found="no request was answered",
    )),
    ("sweep", sweep.sweep, ending(
        "foretoken sweep models/tinycode -s hydra:chain -s medusa:chain \\",
        "    --sweep num_speculative_tokens=2,3,4 --out runs/sweep",
        "foretoken sweep models/tinycode -s hydra:dynamic:num_speculative_tokens=4 \\",
        "    --batch-size 1 --batch-size 4 --sweep max_nodes=8,16,32 --out runs/nodes",
        "foretoken sweep runs/sweep --wide",
    )),
    ("plan", plan.plan, ending(
        "foretoken plan models/tinycode --measure --out runs/plan.svg",
        "foretoken plan models/tinycode -s ngram --batch-size 1 --batch-size 8",
        "foretoken plan Qwen/Qwen3-8B --bandwidth 3350 --flops 989 --memory 80 \\",
        "    --acceptance eagle3:chain=minimaxm3_eagle3.yaml",
    )),
    ("twin", twin.twin, ending(
        "foretoken twin models/tinycode runs/twin --layers 24 --hidden-size 1024",
        "foretoken twin models/tinycode runs/twin --heads models/tinycode-hydra \\",
        "    --draft-model keep",
        found="the twin does not compute the model's function",
    )),
    ("quantize", quantize.quantize, ending(
        "foretoken quantize models/tinycode runs/w8a8 --scheme W8A8",
        "foretoken quantize models/tinycode runs/w4a16 --group-size 64 --text edit",
    )),
    ("models", models.models, ending(
        "foretoken models",
        "foretoken models --json",
    )),
    ("inspect", heads.inspect, ending(
        "foretoken inspect models/tinycode",
        "foretoken inspect models/tinycode-hydra --verify --target models/tinycode",
        found="--verify found something wrong",
    )),
    ("convert", heads.convert, ending(
        "foretoken convert models/tinycode-hydra runs/hydra --to hydra \\",
        "    --target models/tinycode",
        "foretoken convert models/tinycode-medusa runs/trt --to tensorrt_llm \\",
        "    --target models/tinycode --dtype bfloat16",
    )),
    ("data", data.data, ending(
        "foretoken data models/tinycode --text 'foretoken/**/*.py' --out runs/data",
        "foretoken data models/tinycode --jsonl chats.jsonl --self-distill \\",
        "    -s ngram --out runs/data",
    )),
    ("data vocab", data.vocab, ending(
        "foretoken data vocab runs/data --size 512 --out runs/vocab.json",
        "foretoken train eagle3 models/tinycode --data runs/data --out runs/eagle3 \\",
        "    --draft-vocab runs/vocab.json",
    )),
    ("data index", data.index, ending(
        "foretoken data index runs/data --out runs/index",
        "foretoken generate models/tinycode -p 'class Queue:' \\",
        "    -s rest:datastore=runs/index",
    )),
    ("train", train.train, ending(
        "foretoken train medusa models/tinycode --data runs/data --out runs/medusa",
        "foretoken train hydra models/tinycode --data runs/data --out runs/hydra \\",
        "    --set num_layers=2 --steps 1400 --lr 2e-3",
    )),
    ("tune tree", train.tree, ending(
        "foretoken tune tree models/tinycode -s hydra --nodes 32 --out runs/tree.json",
        "foretoken tune tree models/tinycode -s draft_model --nodes 16 --depth 6",
    )),
    ("tune acceptance", train.acceptance, ending(
        "foretoken tune acceptance models/tinycode runs/hydra \\",
        "    --out runs/hydra-measured",
        "foretoken tune acceptance models/tinycode models/tinycode-eagle \\",
        "    --out runs/eagle-prose --prompts prose --num-prompts 4",
    )),
    ("tune stop", train.stop, ending(
        "foretoken tune stop models/tinycode -s draft_model",
        "foretoken tune stop models/tinycode -s eagle --prompts prose",
    )),
    ("doctor", heads.doctor, ending(
        "foretoken doctor models/tinycode --method hydra",
        "foretoken doctor models/tinycode models/tinycode-hydra",
        found="some check found a fault",
    )),
)  # fmt: skip
for _name, _function, _ending in _COMMANDS:
    _settings = {"token_normalize_func": heads.option_name} if _name == "convert" else None
    _class = VllmCommand if _name in ("serve", "batch") else Command
    app.command(_name, cls=_class, epilog=_ending, context_settings=_settings)(options.flattened(_function))


@app.callback(
    invoke_without_command=True,
    epilog=ending(
        "foretoken generate models/tinycode -s ngram -p 'class Queue:'",
        "foretoken chat model.gguf -s draft_model:model=small.gguf",
        "foretoken COMMAND --help",
        found="the command found something wrong",
    ),
)
def foretoken(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Speculative decoding for Hugging Face causal LMs and GGUF files, provably lossless."""
    if version:
        print_version()
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command("version", cls=Command)
def print_version() -> None:
    """Print the version."""
    from foretoken import __version__

    print(__version__)


def system_error(err: OSError) -> str:
    """Returns a sentence that says which operation the system refused."""
    reason = err.strerror or str(err) or type(err).__name__
    where = "" if err.filename is None else f" ('{err.filename}')"
    return f"the system says: {reason}{where}. Check the place, its permissions and the space left on it."
