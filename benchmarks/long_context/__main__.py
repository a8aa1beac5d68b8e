"""Command line: drafting behind long texts, by rows and batch size, and by the position in the output.

    python -m benchmarks.long_context sizes --model runs/long-24x1024/twin --out benchmarks/results/long-context
    python -m benchmarks.long_context positions --out benchmarks/results/long-context-positions

Both commands go on where they stopped. How twins are made, and a run of twenty minutes: README.md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.long_context import positions, sizes
from benchmarks.long_context.passes import row_bytes
from benchmarks.long_context.plot import draw_positions, draw_sizes, write_pictures
from benchmarks.long_context.report import FORMULA, break_even_sentence, positions_table, sizes_table, verdict
from benchmarks.rivals.machine import commit, describe_machine
from benchmarks.rivals.machine import verdict as quietness
from benchmarks.speedup.sizes import Size, digest_of, methods_of, twin_label
from foretoken.bench.cost_twin.make import TwinPlan, make_twin_in_memory
from foretoken.bench.workload import load_prompts
from foretoken.core.errors import ForetokenError, RequestError
from foretoken.decoder.library import set_num_threads
from foretoken.entrypoints.config import checked_setups
from foretoken.files.atomic_files import JournalFile
from foretoken.models.loading import load_model, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.models.loading import LoadedModel

_ROOT = Path(__file__).resolve().parents[2]
_TRAINED = 16384  # positions that the bundled model was trained on
_SELECTIONS = ("streaming_llm", "snapkv", "vegas")
_LOOKUPS = ("ngram", "suffix")
_DEPTH = "num_speculative_tokens=4"


def main(arguments: list[str]) -> int:
    """Measures what is missing and writes the report; returns the exit status."""
    try:
        options = _parser().parse_args(arguments)
        set_num_threads(options.threads)
        command = shlex.join(["python", "-m", "benchmarks.long_context", *arguments])
        (_sizes if options.command == "sizes" else _positions)(options, command)
    except (ValueError, OSError, ForetokenError) as err:
        print(f"Error: {err}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted. The same command goes on where this run stopped.", file=sys.stderr)
        return 130
    return 0


def _sizes(options: argparse.Namespace, command: str) -> None:
    model, texts = _loaded(options)
    place = Path(model.name)
    setups = checked_setups(options.drafters or _usual_drafters(place), target=model.name)
    grid = sizes.Grid(
        rows=options.rows, batches=options.batch, max_tokens=options.tokens, rounds=options.rounds,
        setups=[setup for setup in setups if setup.config is not None], texts=texts,
        until=time.monotonic() + options.seconds,
    )  # fmt: skip
    facts = {**_conditions(options, model), "tokens": options.tokens, "rounds": options.rounds}
    journal = JournalFile(options.runs / f"{options.out.name}.jsonl", facts, advice=_ADVICE)
    left_out = sizes.measure(model, grid, journal, _say)
    wanted = {setup.name for setup in grid.setups}
    cells = [cell for cell in map(sizes.Cell.read, journal.lines) if cell.setup in wanted]
    own, others = {cell.key for cell in cells}, [json.loads(path.read_text(encoding="utf-8")) for path in options.also]
    read = [cell for other in others for cell in map(sizes.Cell.read, other["lines"])]
    cells += [cell for cell in read if cell.key not in own]
    if not cells:
        raise RequestError(f"nothing was measured: {' '.join(left_out)} Expected time and memory for one cell.")
    row = row_bytes(model)
    weights = cells[0].passes.plain - cells[0].batch * cells[0].rows * row
    sentences = [
        *_sentences(facts, journal.date, command),
        break_even_sentence(weights, row, sorted({cell.batch for cell in cells})),
        FORMULA,
    ]
    if all(cell.foreign_s is not None for cell in cells):
        foreign = sum(cell.foreign_s or 0.0 for cell in cells) / sum(cell.wall_s for cell in cells)
        sentences.append(f"{quietness(max(foreign, 0.0))}.")
    for path, other in zip(options.also, others, strict=True):
        places = sorted({(line["rows"], line["batch"]) for line in other["lines"]})
        told = ", ".join(f"{rows:,} in a batch of {batch}" for rows, batch in places)
        sentences.append(
            f"Cells of another run, `{path.name}` (commit {other['commit']}, {other['rounds']} rounds, "
            f"{other['date']}): {told}."
        )
    if max(cell.rows for cell in cells) > _TRAINED:
        sentences.append(f"The model was never trained behind {_TRAINED:,} rows: acceptance there means little.")
    _write(options.out, sentences, sizes_table(cells), left_out, journal)
    _draw(partial(draw_sizes, cells, weights, row, _what(facts)), options.out)


def _positions(options: argparse.Namespace, command: str) -> None:
    model, texts = _loaded(options)
    names = options.drafters or [
        *(f"{name}:{_DEPTH}" for name in dict.fromkeys([*_LOOKUPS, *methods_of(Path(model.name))])),
        *(f"sparse_kv:kv_selection={name}:{_DEPTH}" for name in _SELECTIONS),
    ]
    setups = checked_setups(names, target=model.name)
    prompts, following = _begun(texts, options)
    facts = {
        **_conditions(options, model), "tokens": options.tokens, "num_prompts": len(prompts),
        "prompt_tokens": options.prompt_tokens, "outputs": "short, along held-out texts" if following else "long",
    }  # fmt: skip
    journal = JournalFile(options.runs / f"{options.out.name}.jsonl", facts, advice=_ADVICE)
    plan = positions.Plan(
        setups=[setup for setup in setups if setup.config is not None], prompts=prompts, following=following,
        temperatures=options.temperatures, max_tokens=options.tokens, until=time.monotonic() + options.seconds,
    )  # fmt: skip
    left_out = positions.measure(model, plan, journal, _say)
    wanted = {setup.name for setup in setups}
    lines = [line for line in (positions.Line(**each) for each in journal.lines) if line.setup in wanted]
    lines.sort(key=lambda line: line.temperature)
    if not lines:
        raise RequestError(f"nothing was measured: {' '.join(left_out)} Expected time for one drafter.")
    _write(options.out, [*_sentences(facts, journal.date, command), verdict(lines)], positions_table(lines), left_out,
           journal)  # fmt: skip
    _draw(partial(draw_positions, lines, _what(facts)), options.out)


_ADVICE = "Give another --out or --runs, or remove that file."


def _loaded(options: argparse.Namespace) -> tuple[LoadedModel, list[list[int]]]:
    """The model, or its twin; `LoadedModel.name` is a directory with drafters beside it."""
    if options.twin is None:
        model = load_model(str(options.model), dtype=options.dtype, device=options.device)
    else:
        size = Size.parse(options.twin, num_prompts=1)
        out = options.runs / f"{options.model.resolve().name}-{options.twin}" / "twin"
        plan = TwinPlan(
            model=options.model, out=out, num_layers=size.num_layers, hidden_size=size.hidden_size, fill="random",
            dtype=getattr(torch, options.dtype), device=options.device,
        )  # fmt: skip
        model = make_twin_in_memory(plan)
    tokenizer = load_tokenizer(str(options.model))
    if tokenizer is None:
        raise RequestError(f"'{options.model}' has no tokenizer. Expected tokenizer files beside the weights.")
    return model, [list(tokenizer(text)["input_ids"]) for text in load_prompts(str(options.prompts))]


def _begun(texts: Sequence[list[int]], options: argparse.Namespace) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and the texts that follow them; no texts for outputs of the model's own."""
    size, count = options.prompt_tokens, options.num_prompts
    if not options.along_texts:
        return [text[-size:] for text in texts[:count]], []
    long = [text for text in texts if len(text) >= size + options.tokens][:count]
    if not long:
        raise RequestError(
            f"'{options.prompts}' has no text of {size + options.tokens} tokens. Expected one. Lower --tokens."
        )
    return [text[:size] for text in long], [text[size:] for text in long]


def _usual_drafters(target: Path) -> list[str]:
    """Every selection of KV rows, then everything else that drafts for a target; with four tokens, and controlled."""
    names = [*(f"sparse_kv:kv_selection={name}" for name in _SELECTIONS), *methods_of(target)]
    return [each for name in names for each in (f"{name}:{_DEPTH}", name)]


def _conditions(options: argparse.Namespace, model: LoadedModel) -> dict[str, Any]:
    machine = describe_machine()
    processor = f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['instruction_sets'])})"
    if model.device.type == "cuda":
        processor = f"{torch.cuda.get_device_name(model.device)}; {processor}"
    return {
        "model": twin_label(Path(model.name)) or options.model.resolve().name,
        "model_sha256": digest_of(options.model),
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "prompts": Path(options.prompts).name,
        "processor": processor,
        "torch": torch.__version__,
        "commit": commit("foretoken", "models"),
    }


def _what(facts: dict[str, Any]) -> str:
    return f"{facts['model']}, {facts['dtype']}; {facts['processor']}, {facts['threads']} threads"


def _sentences(facts: dict[str, Any], date: str, command: str) -> list[str]:
    said = "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in facts.items() if key != "model_sha256")
    return [f"{said}; {date}. Command: `{command}`."]


def _write(out: Path, sentences: Sequence[str], table: str, left_out: Sequence[str], journal: JournalFile) -> None:
    """Writes and prints the table; writes JSON."""
    notes = ["Not measured:\n", *(f"- {note}" for note in left_out), ""] if left_out else []
    report = "\n\n".join([*sentences, table, "\n".join(notes)]).rstrip() + "\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(out.name + ".md").write_text(report, encoding="utf-8")
    record = {**journal.conditions, "date": journal.date, "lines": journal.lines, "left_out": list(left_out)}
    out.with_name(out.name + ".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(report)


def _draw(draw: Any, out: Path) -> None:
    if not write_pictures(draw, out):
        _say("No pictures: they need matplotlib (pip install matplotlib).")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_context", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    by_size = commands.add_parser("sizes", help="by rows and batch size")
    by_size.add_argument("--rows", type=int, nargs="+", default=[4096, 8192, 16384], help="tokens of a text at its end")
    by_size.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16])
    by_size.add_argument("--tokens", type=int, default=64, help="output tokens of a text (default: %(default)s)")
    by_size.add_argument("--rounds", type=int, default=3, help="pairs with plain decoding (default: %(default)s)")
    by_size.add_argument(
        "--also",
        type=Path,
        nargs="*",
        default=[],
        metavar="JSON",
        help="reports of other runs, whose cells join this one",
    )
    by_place = commands.add_parser("positions", help="by the position in the output")
    by_place.add_argument("--tokens", type=int, default=8192, help="output tokens of a text (default: %(default)s)")
    by_place.add_argument("--num-prompts", type=int, default=4, help="decoded at once (default: %(default)s)")
    by_place.add_argument("--prompt-tokens", type=int, default=1024, help="the last of each (default: %(default)s)")
    by_place.add_argument(
        "--along-texts", action="store_true", help="short outputs along held-out texts, see README.md"
    )
    by_place.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8, 1.0])
    for each in (by_size, by_place):
        each.add_argument("--model", type=Path, default=_ROOT / "models" / "tinycode16k")
        each.add_argument("--twin", help="LAYERSxHIDDEN: a cost twin of --model, its weights in memory only")
        each.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
        each.add_argument("--drafters", nargs="+", help="as `foretoken bench -s` takes them; all when left out")
        each.add_argument("--prompts", default=_ROOT / "benchmarks" / "prompts" / "long.jsonl")
        each.add_argument("--seconds", type=float, default=1e9, help="no cell begins afterwards")
        each.add_argument("--out", type=Path, required=True, help="files to write, without suffix")
        each.add_argument("--runs", type=Path, default=Path("runs/long_context"), help="what was measured so far")
        each.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
        each.add_argument("--threads", type=int, default=2)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
