"""The class of all commands: lays out `--help`, and refuses empty names and integers out of range."""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError

_VALUES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
_DIRECTORIES = {"model", "target", "init"}  # text options that name a directory or a hub id
_LARGEST = 2**31 - 1  # the largest integer that an option takes
_LARGER = {"seed": 2**63 - 1, "kv_cache_memory_bytes": 2**63 - 1}


class Command(TyperCommand):
    """A command that names values as `N`, `TEXT` or `PATH` in its help, and arguments as in the text about them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See typer; joins the lines of a help paragraph, which are then wrapped to the terminal's width."""
        super().__init__(*args, **kwargs)
        self.help = joined(self.help or "")
        callback = self.callback
        hints = typing.get_type_hints(getattr(callback, "__wrapped__", callback))
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
        """See click; refuses an empty path, which `Path` reads as the current directory, and integers out of range."""
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        rest = super().parse_args(ctx, args)
        for param in self.params:
            name = param.metavar if param.param_type_name == "argument" else max(param.opts, key=len)
            is_name = param.param_type_name == "argument" or param.metavar == "PATH" or param.name in _DIRECTORIES
            if is_name and "" in _values(given.get(param.name)):
                raise ConfigError(f"{name} is empty. Expected a name; . is this directory.")
            limit = _LARGER.get(param.name, _LARGEST)
            for value in _values(ctx.params.get(param.name)):
                if isinstance(value, int) and not -limit <= value <= limit:
                    bound = f"at most {limit}" if value > limit else f"at least {-limit}"
                    raise ConfigError(f"{name} is {shown(value)}. Expected {bound}.")
        return rest

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


def _no_type(ctx: Any) -> None:
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
    """Returns the placeholder of an option's value; "" for a flag."""
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    if parts:
        return _value(parts[0])
    return "" if kind is bool else _VALUES[kind]
