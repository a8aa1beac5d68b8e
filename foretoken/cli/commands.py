"""The commands of `foretoken` by name, and the options before a command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from foretoken.cli import (
    batch,
    bench,
    bench_serve,
    chat,
    convert,
    data,
    doctor,
    generate,
    inspect,
    report,
    serve,
    sweep,
    train,
    tune,
    twin,
    verify,
)
from foretoken.cli.help import Command, VllmCommand, ending, without_flags
from foretoken.core.errors import ForetokenError


class Ended(Exception):
    """A signal or a closed pipe ended a command.

    Attributes:
        code: Exit code, 128 + the signal's number.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Commands(TyperGroup):
    """Runs a command; turns an interruption into our exit code before typer handles it.

    A command's name may be two words: `data vocab` beside `data`, `bench serve` beside `bench`, and `tune tree`.
    """

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
    help="Speculative decoding for any Hugging Face causal LM, provably lossless.",
    cls=_Commands,
    pretty_exceptions_enable=False,
)
_COMMANDS: tuple[tuple[Callable[..., None], str], ...] = (
    (generate.generate, ending(
        "foretoken generate models/tinycode -p 'class Queue:'",
        "foretoken generate models/tinycode -f prompt.txt -s ngram --temperature 0.8",
        "foretoken generate models/tinycode -p 'class Queue:' \\",
        "    -s ngram:num_speculative_tokens=8",
        "foretoken generate models/tinycode -p 'class Queue:' -s ngram+hydra --show \\",
        "    --trace runs/queue.jsonl",
    )),
    (chat.chat, ending(
        "foretoken chat Qwen/Qwen3-0.6B -s ngram",
        "foretoken chat Qwen/Qwen3-0.6B -s ngram --system 'Answer in one sentence.'",
    )),
    (serve.serve, ending(
        "foretoken serve models/tinycode -s ngram",
        "foretoken serve Qwen/Qwen3-0.6B -s ngram --host 0.0.0.0 --api-key-file keys",
        found="the engine failed",
    )),
    (batch.batch, ending(
        "foretoken batch in.jsonl out.jsonl --model models/tinycode -s ngram",
        "foretoken batch in.jsonl out.jsonl --model Qwen/Qwen3-0.6B --max-num-seqs 16",
    )),
    (report.report, ending(
        "foretoken report runs/queue.jsonl",
        "foretoken report runs/queue.jsonl --out runs/page.html",
    )),
    (verify.verify, ending(
        "foretoken verify models/tinycode -s ngram -s draft_model:tree",
        "foretoken verify models/tinycode -s hydra --batch-size 1 --batch-size 3",
        found="some text differs by more than rounding",
    )),
    (bench.bench, ending(
        "foretoken bench models/tinycode -s ngram -s draft_model --temperature 0.8",
        "foretoken bench models/tinycode -s ngram:num_speculative_tokens=8 --wide",
    )),
    (bench_serve.serve, ending(
        "foretoken bench serve --base-url http://127.0.0.1:8000 --max-concurrency 16",
        "foretoken bench serve --endpoint chat --request-rate 4 --num-prompts 200 \\",
        "    --save-result runs/load.json",
        found="no request was answered",
    )),
    (sweep.sweep, ending(
        "foretoken sweep models/tinycode -s hydra:chain -s medusa:chain \\",
        "    --sweep num_speculative_tokens=2,3,4 --out runs/sweep",
        "foretoken sweep models/tinycode -s hydra:dynamic:num_speculative_tokens=4 \\",
        "    --batch-size 1 --batch-size 4 --sweep max_nodes=8,16,32 --out runs/nodes",
        "foretoken sweep runs/sweep --wide",
    )),
    (twin.twin, ending(
        "foretoken twin models/tinycode runs/twin --layers 24 --hidden-size 1024",
        "foretoken twin models/tinycode runs/twin --heads models/tinycode-hydra \\",
        "    --draft-model keep",
        found="the twin does not compute the model's function",
    )),
    (inspect.inspect, ending(
        "foretoken inspect models/tinycode",
        "foretoken inspect models/tinycode-hydra --verify --target models/tinycode",
        found="--verify found something wrong",
    )),
    (convert.convert, ending(
        "foretoken convert models/tinycode-hydra runs/hydra --to hydra \\",
        "    --target models/tinycode",
        "foretoken convert models/tinycode-medusa runs/trt --to tensorrt_llm \\",
        "    --target models/tinycode --dtype bfloat16",
    )),
    (data.data, ending(
        "foretoken data models/tinycode --text 'foretoken/**/*.py' --out runs/data",
        "foretoken data models/tinycode --jsonl chats.jsonl --self-distill \\",
        "    -s ngram --out runs/data",
    )),
    (data.vocab, ending(
        "foretoken data vocab runs/data --size 512 --out runs/vocab.json",
        "foretoken train eagle3 models/tinycode --data runs/data --out runs/eagle3 \\",
        "    --draft-vocab runs/vocab.json",
    )),
    (data.index, ending(
        "foretoken data index runs/data --out runs/index",
        "foretoken generate models/tinycode -p 'class Queue:' \\",
        "    -s rest:datastore=runs/index",
    )),
    (train.train, ending(
        "foretoken train medusa models/tinycode --data runs/data --out runs/medusa",
        "foretoken train hydra models/tinycode --data runs/data --out runs/hydra \\",
        "    --set num_layers=2 --steps 1400 --lr 2e-3",
    )),
    (tune.tree, ending(
        "foretoken tune tree models/tinycode -s hydra --nodes 32 --out runs/tree.json",
        "foretoken tune tree models/tinycode -s draft_model --nodes 16 --depth 6",
    )),
    (doctor.doctor, ending(
        "foretoken doctor models/tinycode --method hydra",
        "foretoken doctor models/tinycode models/tinycode-hydra",
        found="some check found a fault",
    )),
)  # fmt: skip
_TWO_WORDS: dict[Callable[..., None], str] = {
    bench_serve.serve: "bench serve", data.vocab: "data vocab", data.index: "data index", tune.tree: "tune tree",
}  # fmt: skip
for _function, _ending in _COMMANDS:
    _settings = {"token_normalize_func": convert.option_name} if _function is convert.convert else None
    _name = _TWO_WORDS.get(_function)
    _class = VllmCommand if _function in (serve.serve, batch.batch) else Command
    app.command(_name, cls=_class, epilog=_ending, context_settings=_settings)(_function)


@app.callback(
    invoke_without_command=True,
    epilog=ending(
        "foretoken generate models/tinycode -s ngram -p 'class Queue:'",
        "foretoken generate Qwen/Qwen3-0.6B -s ngram -p 'def read_config(path):'",
        "foretoken COMMAND --help",
        found="the command found something wrong",
    ),
)
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
