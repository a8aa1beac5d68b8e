"""The entry point of `foretoken COMMAND …`: turns errors into one sentence on standard error and an exit code.

Exit codes: 0, 1 (a verdict: the command found a bug or a fault), 2 (bad input or a system error), 130 (Ctrl-C), 141
(the reader of a pipe closed it).
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Entry point of the `foretoken` command."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        code = _run_command()
    except KeyboardInterrupt:  # before the command began
        code = 130
    _end_at_once_on_ctrl_c()
    sys.exit(code)


def _end_at_once_on_ctrl_c() -> None:
    """Restores the system's handling of Ctrl-C: results are written, and libraries print a traceback at exit."""
    with contextlib.suppress(ValueError):  # not the main thread, which alone gets Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _run_command() -> int:
    from foretoken.cli import terminal
    from foretoken.core.errors import ForetokenError

    try:
        terminal.prepare_streams()
    except OSError as err:
        terminal.print_note(f"error: {err}. Expected a file, a pipe or a terminal to write to.")
        return 2
    terminal.show_log()
    import typer

    from foretoken.cli.commands import app

    usage_error: type[Exception] = typer.BadParameter.__mro__[1]  # click's class; its module depends on typer's version
    code = 2
    try:
        code = int(app(standalone_mode=False) or 0)
        sys.stdout.flush()
    except typer.Abort:
        code = 130
    except BrokenPipeError:  # the reader closed the pipe, as in `foretoken … | head`
        code = 141
    except ForetokenError as err:
        terminal.print_note(f"error: {err}")
    except usage_error as err:
        terminal.print_note(_usage(err))
    except OSError as err:
        terminal.print_note(_system_error(err))
    except (Exception, SystemExit) as err:
        code = _ended_from_outside(err) or code
        if isinstance(err, ModuleNotFoundError) and err.name == "torch":
            terminal.print_note(_NO_TORCH)
        elif code not in _ENDINGS.values():
            raise
    terminal.end_output()
    return code


_ENDINGS = {KeyboardInterrupt: 130, BrokenPipeError: 141}  # as shells report SIGINT and SIGPIPE


def _ended_from_outside(err: BaseException | None) -> int | None:
    while err is not None:
        if type(err) in _ENDINGS:
            return _ENDINGS[type(err)]
        err = err.__cause__ or err.__context__
    return None


_NO_TORCH = (
    "error: torch is not installed. Install it first; without a GPU its CPU build is enough, which "
    'https://pytorch.org/get-started/locally shows under Compute Platform "CPU".'
)


def _usage(err: Exception) -> str:
    message = err.format_message()  # type: ignore[attr-defined]
    context = getattr(err, "ctx", None)
    command = "foretoken" if context is None else context.command_path
    return f"error: {message}\nTry '{command} --help'."


def _system_error(err: OSError) -> str:
    reason = err.strerror or str(err) or type(err).__name__
    where = "" if err.filename is None else f" ('{err.filename}')"
    return f"error: the system says: {reason}{where}. Check the place, its permissions and the space left on it."
