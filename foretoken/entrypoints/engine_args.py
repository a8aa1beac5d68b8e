"""`EngineArgs` and `AsyncEngineArgs`: arguments of `LLM` from code or a command line, as in vLLM."""

from __future__ import annotations

import argparse
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Self, TypeVar

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.entrypoints.llm import LLM
from foretoken.entrypoints.vllm_arguments import OTHER_ARGUMENTS, read_option

if TYPE_CHECKING:
    import os

_Parser = TypeVar("_Parser", bound=argparse._ActionsContainer)  # a parser or an argument group
_PARAMETERS = {name: each for name, each in signature(LLM).parameters.items() if each.kind != Parameter.VAR_KEYWORD}
_NOT_TYPED = {"drafter", "on_step", "trace"}  # functions, and `trace`, which needs one


class EngineArgs:
    """Arguments of `LLM`, for `LLM.from_engine_args(args)` or `LLM(**vars(args))`. `LLM` checks the values.

    An argument that was not given reads as its default.
    """

    def __init__(self, model: str | os.PathLike[str], **arguments: Any) -> None:
        """Takes the arguments of `LLM`; raises `ConfigError` for a name that neither `LLM` nor vLLM has."""
        for name in arguments:
            if name not in _PARAMETERS and name not in OTHER_ARGUMENTS:
                raise ConfigError(f"EngineArgs has no argument {shown(name)}. {nearest_name_hint(name, _PARAMETERS)}")
        vars(self).update(arguments, model=model)

    def __getattr__(self, name: str) -> Any:
        if name not in _PARAMETERS and name not in OTHER_ARGUMENTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return _PARAMETERS[name].default if name in _PARAMETERS else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @staticmethod
    def add_cli_args(parser: _Parser) -> _Parser:
        """Adds an option for each argument and returns the parser; its result lacks options that are not given."""
        for name in (*_PARAMETERS, *OTHER_ARGUMENTS):
            if name in _NOT_TYPED:
                continue
            option = f"--{name.replace('_', '-')}"
            is_switch = OTHER_ARGUMENTS[name].is_switch if name in OTHER_ARGUMENTS else "bool" in _type(name)
            form: dict[str, Any] = {"type": str if "str" in _type(name) else read_option}
            if is_switch:
                form = {"action": argparse.BooleanOptionalAction}
            parser.add_argument(option, default=argparse.SUPPRESS, **form)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Returns the arguments in a parser's result; raises `ConfigError` if it has no model."""
        given = {name: value for name, value in vars(args).items() if name in _PARAMETERS or name in OTHER_ARGUMENTS}
        if "model" not in given:
            raise ConfigError("there is no model among the arguments. Expected --model DIRECTORY.")
        return cls(**given)


class AsyncEngineArgs(EngineArgs):
    """Arguments for `AsyncLLM.from_engine_args(args)`; the same as `EngineArgs`."""


def _type(name: str) -> str:
    """Returns the annotation of an argument; empty for an argument that only vLLM has."""
    return str(_PARAMETERS[name].annotation) if name in _PARAMETERS else ""
