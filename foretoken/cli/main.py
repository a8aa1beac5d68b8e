"""`foretoken COMMAND …`: finds the command; errors that a user can cause become one sentence and exit code 2."""

from __future__ import annotations

import os
import sys

import typer

from foretoken.cli import bench, convert, data, doctor, generate, inspect, train, verify
from foretoken.core.errors import ForetokenError

app = typer.Typer(
    name="foretoken",
    help="Speculative decoding for any Hugging Face causal LM, provably lossless.",
    no_args_is_help=True,
    add_completion=False,
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


@app.command("version")
def version() -> None:
    """Print the version."""
    from foretoken import __version__

    print(__version__)


def main() -> None:
    """Entry point of the `foretoken` command."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except ForetokenError as err:
        print(f"error: {err}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader went away, as in `foretoken … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
