"""The commands of `foretoken` by name, and the options before a command."""

import inspect
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from foretoken.cli import bench, chat, data, generate, heads, models, options, plan, serve, sweep, train
from foretoken.core.checks import check_range
from foretoken.core.errors import ConfigError
from foretoken.models.names import resolve_model

_VALUES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
_DIRECTORIES = {"model", "target", "init"}  # text options that name a directory or a hub id
_INTEGERS = (1 - 2**31, 2**31 - 1)
_NUMBERS = (0.0, 1e100)  # a choice: no option needs a larger number, or a negative one
# The least and the largest number of other options, by name. Those of batches and machines are choices.
_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("seed", "kv_cache_memory_bytes"), (1 - 2**63, 2**63 - 1)),
    **dict.fromkeys(("batch_size", "max_num_seqs"), (1, 2**16)),
    **dict.fromkeys(("top_p", "min_p", "gpu_memory_utilization", "held_out_fraction"), (0, 1)),
    **dict.fromkeys(("bandwidth", "flops", "memory"), (1e-3, 1e9)),
    "temperature": (0, 100),
    "host_ms": (0, 1e6),
}


class _Command(TyperCommand):
    """A command with `N`, `TEXT` or `PATH` for values in its help, and names in capitals for arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The lines of a paragraph are joined, to be wrapped to the terminal's width.
        self.help = "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", self.help or ""))
        callback = getattr(self.callback, "__wrapped__", self.callback)
        hints = typing.get_type_hints(callback)
        whole = typing.get_type_hints(callback, include_extras=True)
        self._models = [name for name, hint in whole.items() if _names_model(hint)]
        for param in self.params:
            is_argument = param.param_type_name == "argument"
            if param.metavar is None and param.name in hints:
                param.metavar = param.name.upper() if is_argument else _value(hints[param.name])
            if is_argument:  # shows the name alone; newer versions of typer add a type
                vars(param)["display_type_rich"] = _no_type

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flags(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuses an empty path, which `Path` reads as the current directory, and numbers out of range."""
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
        """Asks the hub for models that are not on this machine, before anything heavy is imported."""
        for name in self._models:
            if ctx.params.get(name):
                ctx.params[name] = resolve_model(ctx.params[name])
        return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Hides other names of an option, and of a switch's other side, unless the option's text mentions them."""
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
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        names = [str(param.metavar) if param.required else f"[{param.metavar}]" for param in arguments]
        return [self.options_metavar or "", *names]


class _VllmCommand(_Command):
    """A command that `vllm` has too: takes vLLM's options at neutral values and refuses other values."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        from foretoken.entrypoints.vllm_arguments import without_other_options

        own = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        return super().parse_args(ctx, without_other_options(args, own))


def _names_model(hint: Any) -> bool:
    return any(getattr(each, "parser", None) is options.local_path for each in getattr(hint, "__metadata__", ()))


def _no_type(ctx: Any) -> None:  # typer passes `ctx` by name
    del ctx


def _without_flags(params: list[Any]) -> list[Any]:
    """Removes the values of switches from the help of options. Changes the options."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


def _ending(*examples: str, found: str | None = None) -> str:
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


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a command for typer: each parameter that is a group of options is replaced by the group's fields.

    A group is a dataclass. `Annotated[GROUP, ("dtype", "device")]` takes these of its fields. A default of the
    parameter, an instance of the group, gives other defaults.
    """
    groups: dict[str, tuple[Any, Any]] = {}
    parameters: list[inspect.Parameter] = []
    hints = typing.get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        group: Any = getattr(hints[name], "__origin__", hints[name])
        if not is_dataclass(group):
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        names = getattr(hints[name], "__metadata__", [[each.name for each in fields(group)]])[0]
        groups[name], own = (group, names), typing.get_type_hints(group, include_extras=True)
        defaults = group if parameter.default is parameter.empty else parameter.default
        parameters += (
            parameter.replace(name=each, default=getattr(defaults, each), annotation=own[each]) for each in names
        )

    def run(**given: Any) -> None:
        for name, (group, names) in groups.items():
            given[name] = group(**{each: given.pop(each) for each in names})
        command(**given)

    update_wrapper(run, command)
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


class _Commands(TyperGroup):
    """Runs a command by a name of one or two words: `data vocab` beside `data`, `bench serve` beside `bench`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_flags(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = " ".join(args[:2])
        if len(args) > 1 and name in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="foretoken",
    help="Speculative decoding for Hugging Face causal LMs and GGUF files, provably lossless.",
    cls=_Commands,
    pretty_exceptions_enable=False,
)
_COMMANDS: tuple[tuple[str, Callable[..., None], str], ...] = (
    ("generate", generate.generate, _ending(
        "foretoken generate models/tinycode -p 'class Queue:'",
        "foretoken generate models/tinycode -f prompt.txt -s ngram --temperature 0.8",
        "foretoken generate models/tinycode -p 'class Queue:' \\",
        "    -s ngram:num_speculative_tokens=8",
        "foretoken generate models/tinycode -p 'class Queue:' -s ngram+hydra --show \\",
        "    --trace runs/queue.jsonl",
    )),
    ("chat", chat.chat, _ending(
        "foretoken chat model.gguf -s draft_model:model=small.gguf",
        "foretoken chat model.gguf -s suffix --system 'Answer in one sentence.'",
    )),
    ("serve", serve.serve, _ending(
        "foretoken serve models/tinycode -s ngram",
        "foretoken serve Qwen/Qwen3-0.6B -s ngram --host 0.0.0.0 --api-key-file keys",
        found="the engine failed",
    )),
    ("batch", serve.batch, _ending(
        "foretoken batch in.jsonl out.jsonl --model models/tinycode -s ngram",
        "foretoken batch in.jsonl out.jsonl --model Qwen/Qwen3-0.6B --max-num-seqs 16",
    )),
    ("report", generate.report, _ending(
        "foretoken report runs/queue.jsonl",
        "foretoken report runs/queue.jsonl --out runs/page.html",
    )),
    ("verify", heads.verify, _ending(
        "foretoken verify models/tinycode -s ngram -s draft_model:tree",
        "foretoken verify models/tinycode -s hydra --batch-size 1 --batch-size 3",
        found="some text differs by more than rounding",
    )),
    ("bench", bench.bench, _ending(
        "foretoken bench models/tinycode -s ngram -s draft_model --temperature 0.8",
        "foretoken bench models/tinycode -s ngram:num_speculative_tokens=8 --wide",
        "foretoken bench models/tinycode -s hydra --synthetic-acceptance 0.8,0.7",
    )),
    ("bench serve", bench.bench_serve, _ending(
        "foretoken bench serve --base-url http://127.0.0.1:8000 --max-concurrency 16",
        "foretoken bench serve --endpoint chat --request-rate 4 --num-prompts 200 \\",
        "    --save-result runs/load.json",
        found="no request was answered",
    )),
    ("sweep", sweep.sweep, _ending(
        "foretoken sweep models/tinycode -s hydra:chain -s medusa:chain \\",
        "    --sweep num_speculative_tokens=2,3,4 --out runs/sweep",
        "foretoken sweep models/tinycode -s hydra:dynamic:num_speculative_tokens=4 \\",
        "    --batch-size 1 --batch-size 4 --sweep max_nodes=8,16,32 --out runs/nodes",
        "foretoken sweep runs/sweep --wide",
    )),
    ("plan", plan.plan, _ending(
        "foretoken plan models/tinycode --measure --out runs/plan.svg",
        "foretoken plan models/tinycode -s ngram --batch-size 1 --batch-size 8",
        "foretoken plan Qwen/Qwen3-8B --bandwidth 3350 --flops 989 --memory 80 \\",
        "    --acceptance eagle3:chain=minimaxm3_eagle3.yaml",
    )),
    ("twin", models.twin, _ending(
        "foretoken twin models/tinycode runs/twin --layers 24 --hidden-size 1024",
        "foretoken twin models/tinycode runs/twin --heads models/tinycode-hydra \\",
        "    --draft-model keep",
        found="the twin does not compute the model's function",
    )),
    ("quantize", models.quantize, _ending(
        "foretoken quantize models/tinycode runs/w8a8 --scheme W8A8",
        "foretoken quantize models/tinycode runs/w4a16 --group-size 64 --text edit",
    )),
    ("models", models.models, _ending(
        "foretoken models",
        "foretoken models --json",
    )),
    ("inspect", models.inspect, _ending(
        "foretoken inspect models/tinycode",
        "foretoken inspect models/tinycode-hydra --verify --target models/tinycode",
        found="--verify found something wrong",
    )),
    ("convert", heads.convert, _ending(
        "foretoken convert models/tinycode-hydra runs/hydra --to hydra \\",
        "    --target models/tinycode",
        "foretoken convert models/tinycode-medusa runs/trt --to tensorrt_llm \\",
        "    --target models/tinycode --dtype bfloat16",
    )),
    ("data", data.data, _ending(
        "foretoken data models/tinycode --text 'foretoken/**/*.py' --out runs/data",
        "foretoken data models/tinycode --jsonl chats.jsonl --self-distill \\",
        "    -s ngram --out runs/data",
    )),
    ("data vocab", data.vocab, _ending(
        "foretoken data vocab runs/data --size 512 --out runs/vocab.json",
        "foretoken train eagle3 models/tinycode --data runs/data --out runs/eagle3 \\",
        "    --draft-vocab runs/vocab.json",
    )),
    ("data index", data.index, _ending(
        "foretoken data index runs/data --out runs/index",
        "foretoken generate models/tinycode -p 'class Queue:' \\",
        "    -s rest:datastore=runs/index",
    )),
    ("train", train.train, _ending(
        "foretoken train medusa models/tinycode --data runs/data --out runs/medusa",
        "foretoken train hydra models/tinycode --data runs/data --out runs/hydra \\",
        "    --set num_layers=2 --steps 1400 --lr 2e-3",
    )),
    ("tune tree", train.tree, _ending(
        "foretoken tune tree models/tinycode -s hydra --nodes 32 --out runs/tree.json",
        "foretoken tune tree models/tinycode -s draft_model --nodes 16 --depth 6",
    )),
    ("tune acceptance", train.acceptance, _ending(
        "foretoken tune acceptance models/tinycode runs/hydra \\",
        "    --out runs/hydra-measured",
        "foretoken tune acceptance models/tinycode models/tinycode-eagle \\",
        "    --out runs/eagle-prose --prompts prose --num-prompts 4",
    )),
    ("tune stop", train.stop, _ending(
        "foretoken tune stop models/tinycode -s draft_model",
        "foretoken tune stop models/tinycode -s eagle --prompts prose",
    )),
    ("doctor", heads.doctor, _ending(
        "foretoken doctor models/tinycode --method hydra",
        "foretoken doctor models/tinycode models/tinycode-hydra",
        found="some check found a fault",
    )),
)  # fmt: skip
for _name, _function, _help in _COMMANDS:
    _settings = {"token_normalize_func": heads.option_name} if _name == "convert" else None
    _class = _VllmCommand if _name in ("serve", "batch") else _Command
    app.command(_name, cls=_class, epilog=_help, context_settings=_settings)(flattened(_function))


@app.callback(
    invoke_without_command=True,
    epilog=_ending(
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


@app.command("version", cls=_Command)
def print_version() -> None:
    """Print the version."""
    from foretoken import __version__

    print(__version__)
