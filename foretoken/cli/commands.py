"""The commands of `foretoken` by name, and the options that stand before a command."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from foretoken.cli import bench, convert, data, doctor, generate, inspect, train, verify
from foretoken.core.errors import ForetokenError


class Ended(Exception):  # noqa: N818 - not an error: the user or a reader of the output ended the command
    """A command was ended from outside.

    Attributes:
        code: Exit code, 128 + the signal's number.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Commands(TyperGroup):
    """Runs a command; what its surroundings do to it becomes a value before typer turns it into another exit code."""

    def invoke(self, ctx: Any) -> Any:
        """See click.

        Raises:
            Ended: After Ctrl-C, or when nobody reads the output any longer.
            ForetokenError: When the system refuses to read or write a file.
        """
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
    help="Speculative decoding for any Hugging Face causal LM, provably lossless.",
    cls=_Commands,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("verify")(verify.verify)
app.command("bench")(bench.bench)
app.command("inspect")(inspect.inspect)
app.command("convert")(convert.convert)
app.command("data")(data.data)
app.command("train")(train.train)
app.command("doctor")(doctor.doctor)


@app.callback(invoke_without_command=True)
def foretoken(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Speculative decoding for any Hugging Face causal LM, provably lossless."""
    if version:
        print_version()
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command("version")
def print_version() -> None:
    """Print the version."""
    from foretoken import __version__

    print(__version__)


def system_error(err: OSError) -> str:
    """What the system refused, in a sentence."""
    reason = err.strerror or str(err) or type(err).__name__
    where = "" if err.filename is None else f" ('{err.filename}')"
    return f"the system says: {reason}{where}. Check the place, its permissions and the space left on it."
