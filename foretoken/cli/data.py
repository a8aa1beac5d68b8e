"""`foretoken data`: packs text as token windows for training heads; makes a draft vocabulary and a datastore."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from foretoken.entrypoints.llm import LLM
    from foretoken.training.data.corpus import Corpus, DataProgress, DocumentMaker


def index(
    data: Annotated[Path, typer.Argument(help="Packed tokens, as `foretoken data` writes them.")],
    out: Annotated[Path, typer.Option(help="Directory to make, which `-s rest:datastore=DIR` drafts from.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a datastore in OUT.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Sort the suffixes of packed tokens into a datastore, which finds any run of tokens and what followed it.

    Sorting takes 60 bytes of memory a token. The files take 6 (8 with a vocabulary above 65536 tokens). The tokens must
    come from the target's tokenizer. Drafts never change the text. Drafting maps the files into memory: do not change
    them meanwhile.
    """
    from foretoken.drafters.rest import DATASTORE, SORTED_DEPTH, write_datastore
    from foretoken.training.data.packed import PackedTokens

    DATASTORE.check(out, force=force)
    packed = PackedTokens.open(data)
    begin = time.perf_counter()

    def show(num_sorted: int) -> None:
        terminal.print_note(
            f"{len(packed.tokens)} suffixes sorted by {num_sorted} of {SORTED_DEPTH} tokens, "
            f"{time.perf_counter() - begin:.1f} s"
        )

    terminal.print_note(f"sorting the suffixes of {len(packed.tokens)} tokens")
    facts = {name: packed.meta[name] for name in ("vocab_size", "eos_id", "tokenizer_sha", "tokens_sha256")}
    with _ending_cleanly():
        made = write_datastore(out, packed.tokens, **facts, force=force, on_round=show)
    seconds = time.perf_counter() - begin
    if as_json:
        options.print_json({
            "out": str(out), "tokens": made.num_tokens, "vocab_size": made.vocab_size, "seconds": seconds,
            "tokens_sha256": made.tokens_sha256,
        })  # fmt: skip
        return
    terminal.prose(f"{out}: {made.num_tokens} tokens in {seconds:.1f} s. Draft from it with -s rest:datastore={out}")


def vocab(
    data: Annotated[Path, typer.Argument(help="Packed tokens, as `foretoken data` writes them.")],
    size: Annotated[int, typer.Option(min=1, help="Tokens of the draft vocabulary.")],
    out: Annotated[Path, typer.Option(help="File to make, JSON, which `foretoken train` takes.")],
    as_json: options.AsJson = False,
) -> None:
    """Choose the tokens that a head drafts: the most frequent labels of packed tokens.

    A pass reads a smaller LM head in less time. The target alone writes the tokens that the head cannot draft, so the
    text does not change. Coverage is the share of the labels that can be drafted.
    """
    from foretoken.training.data.packed import PackedTokens, count_vocabulary

    options.check_absent(out, "file")
    counted = count_vocabulary(PackedTokens.open(data), size)
    counted.vocabulary.write(out)
    if counted.num_filled:
        terminal.print_note(
            f"{counted.num_filled} of {size} tokens are not labels in '{data}': the lowest remaining ids fill "
            "the vocabulary"
        )
    if as_json:
        options.print_json({
            "out": str(out), "size": size, "coverage": counted.vocabulary.coverage, "labels": counted.num_labels,
            "filled": counted.num_filled,
        })  # fmt: skip
        return
    terminal.print_line(
        f"{out}: {size} tokens, coverage {counted.vocabulary.coverage:.2%} of {counted.num_labels} labels"
    )


def data(
    target: Annotated[
        str,
        typer.Argument(
            parser=options.local_path, help=f"Target, whose tokenizer encodes the text: {options.MODEL_FORMS}."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory to make: train/ and perhaps held_out/.")],
    text: Annotated[
        list[str] | None, typer.Option(help="Text file, directory or glob; a file is a document. May be repeated.")
    ] = None,
    jsonl: Annotated[
        list[str] | None,
        typer.Option(
            help=".jsonl, .jsonl.gz or .json with text, prompt and completion, messages, or another form that "
            "--prompts of `foretoken bench` reads. May be repeated."
        ),
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Hugging Face data set: hub name, directory or file.")] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Its configuration.")] = None,
    split: Annotated[str, typer.Option(help="Its split.")] = "train",
    text_column: Annotated[str, typer.Option(help="Column of plain text, in JSON and data sets.")] = "text",
    held_out_fraction: Annotated[
        float, typer.Option(help="Share of documents for held_out/, chosen by a hash of their text.")
    ] = 0.0,
    held_out: Annotated[str | None, typer.Option(help="Text or JSON lines for held_out/ instead.")] = None,
    num_documents: Annotated[int | None, typer.Option(min=1, help="Take the first N documents.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="End train/ with the document that reaches N tokens.")
    ] = None,
    self_distill: Annotated[
        bool, typer.Option("--self-distill", help="Let the target write the responses; only they are labels.")
    ] = False,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt: the first N tokens of each text.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a response.")] = 256,
    temperature: Annotated[float, typer.Option(help="Of the responses; 0 for greedy decoding.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the first response; the i-th gets seed + i.")] = 0,
    supervise_all: Annotated[
        bool, typer.Option("--supervise-all", help="With --self-distill: prompts are labels too.")
    ] = False,
    generated: Annotated[
        Path | None, typer.Option(help="File of responses to continue. Default: OUT.generated.jsonl.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Responses decoded at once.")] = 8,
    *,
    drafter: options.DrafterChoice,
    loading: Annotated[options.LoadOptions, ("dtype", "device", "runner", "threads")],
    force: Annotated[bool, typer.Option("--force", help="Replace packed tokens in OUT.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Encode text with the target's tokenizer into OUT/train (and OUT/held_out), ready for training heads.

    Documents end with the tokenizer's EOS and are packed one after another. In conversations only assistant turns are
    labels, in prompts with completions only the completions. With --self-distill the target is loaded and writes the
    responses itself; an interrupted run continues from its file of responses. OUT appears whole or not at all.

    Two further commands read the packed tokens: `foretoken data vocab` chooses the tokens that a head drafts, and
    `foretoken data index` makes a datastore to draft from. A target in a directory called vocab or index is named
    ./vocab or ./index.
    """
    from foretoken.training.data.corpus import (
        TRAIN,
        CorpusPlan,
        build_corpus,
        dataset_source,
        file_source,
        json_source,
        text_source,
    )
    from foretoken.training.data.documents import DistillSettings, Encoder, SelfDistiller
    from foretoken.training.data.packed import PACKED_TOKENS

    PACKED_TOKENS.check(out, force=force)
    texts = drafter.texts
    if texts is not None and (len(texts) > 1 or not self_distill):
        raise ConfigError("data takes one --speculative-config, together with --self-distill. Leave the others out.")
    responses = _file_of_responses(generated, out)
    sources = [*map(text_source, text or ()), *(json_source(path, text_column=text_column) for path in jsonl or ())]
    if dataset is not None:
        sources.append(dataset_source(dataset, config=dataset_config, split=split, text_column=text_column))
    plan = CorpusPlan(
        sources=sources, held_out_fraction=held_out_fraction, num_documents=num_documents, max_tokens=max_tokens,
        held_out_sources=[file_source(held_out, text_column=text_column)] if held_out is not None else [],
    )  # fmt: skip
    meta: dict[str, Any] = {"target": target}
    if self_distill:
        settings = DistillSettings(
            prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
        )
        meta["self_distillation"] = {**asdict(settings), "supervise_all": supervise_all}
    with _ending_cleanly(), _shown() as on_progress:
        if not self_distill:
            tokenizer, vocab_size = _tokenizer(target)
        else:
            llm = _target(target, texts, loading, batch_size)
            tokenizer, vocab_size = llm.tokenizer, llm.target.vocab_size

        def make(part: str) -> DocumentMaker:
            if not self_distill:
                return Encoder(tokenizer)
            file = responses if part == TRAIN else responses.with_name(f"{part}.{responses.name}")
            return SelfDistiller(
                llm, settings, file, max_num_seqs=batch_size, supervise_all=supervise_all,
                on_responses=lambda done, total: on_progress((done, total)),
            )  # fmt: skip

        corpus = build_corpus(
            out, plan, tokenizer, make, vocab_size=vocab_size, meta=meta, force=force, on_progress=on_progress
        )
    _report(target, out, corpus, as_json=as_json)


def _file_of_responses(given: Path | None, out: Path) -> Path:
    path = out.resolve()
    responses = given if given is not None else path.with_name(f"{path.name}.generated.jsonl")
    if path in responses.resolve().parents:
        raise ConfigError(
            f"--generated '{responses}' lies in --out '{out}'. Expected a file outside, for OUT is replaced."
        )
    return responses


def _tokenizer(target: str) -> tuple[Any, int | None]:
    """Returns the tokenizer, and the target's number of tokens; None where its files do not state it."""
    from foretoken.entrypoints.drafter_files import check_is_no_head
    from foretoken.files.bounded_reads import read_json_object
    from foretoken.models.loading import load_config, load_tokenizer
    from foretoken.training.data.packed import MOST_TOKENS

    tokenizer = load_tokenizer(target)
    if tokenizer is None:
        check_is_no_head(target)
        raise RequestError(f"'{target}' has no tokenizer. Expected a model with a tokenizer.")
    if not Path(target).is_dir():
        return tokenizer, load_config(target).get_text_config().vocab_size
    config = Path(target) / "config.json"
    stated = read_json_object(config) if config.exists() else {}
    text = stated.get("text_config", stated)
    size = text.get("vocab_size") if isinstance(text, dict) else None
    return tokenizer, size if type(size) is int and 0 < size <= MOST_TOKENS else None


def _target(target: str, drafter: list[str] | None, loading: options.LoadOptions, batch_size: int) -> LLM:
    from foretoken.entrypoints.config import checked_setup

    setup = checked_setup(drafter[0] if drafter else "plain", target=target)
    options.check_has_target_text("data", setup)
    return loading.make_llm(*loading.load(target), setup, max_num_seqs=batch_size)


@contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Makes SIGTERM end the work as Ctrl-C does, so that half-written directories are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        del frame
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _shown() -> Iterator[Callable[[DataProgress | tuple[int, int]], None]]:
    """Yields a function that shows the progress of the corpus, or of the prompts that the target answers."""
    last, line = time.perf_counter(), ""
    with terminal.renewed_line() as (say, every):

        def show(progress: DataProgress | tuple[int, int]) -> None:
            nonlocal last, line
            ending = ""
            if isinstance(progress, tuple):
                ending = f"{'; ' if line else ''}{progress[0]} of the next {progress[1]} prompts are answered"
            else:
                line = _line(progress)
            if time.perf_counter() - last >= every:
                last = time.perf_counter()
                say(line + ending)

        yield show


def _line(progress: DataProgress) -> str:
    left = progress.seconds_left
    ending = "" if left is None else f", {timedelta(seconds=round(left))} left"
    return (
        f"{progress.documents} documents, {progress.tokens} tokens, {progress.tokens_per_s:.0f} tokens/s, "
        f"{timedelta(seconds=round(progress.seconds))}{ending}"
    )


def _report(target: str, out: Path, corpus: Corpus, *, as_json: bool) -> None:
    metas = {name: packed.meta for name, packed in corpus.parts.items()}
    parts = {
        name: {
            "documents": meta["num_documents"],
            "tokens": meta["num_tokens"],
            "supervised": meta["num_supervised"],
            "supervised_share": meta["num_supervised"] / meta["num_tokens"],
            "tokens_sha256": meta["tokens_sha256"],
        }
        for name, meta in metas.items()
    }
    seconds, tokens_per_s = corpus.progress.seconds, corpus.progress.tokens_per_s
    if as_json:
        options.print_json({
            "target": target, "out": str(out), **parts, "skipped": dict(corpus.skipped),
            "resumed": corpus.num_resumed, "seconds": seconds, "tokens_per_s": tokens_per_s,
        })  # fmt: skip
        return
    for name, part in parts.items():
        terminal.print_line(
            f"{out / name}: {part['documents']} documents, {part['tokens']} tokens, "
            f"{part['supervised_share']:.1%} supervised"
        )
    for reason, count in corpus.skipped.items():
        terminal.print_line(f"left out: {count} {reason}")
    resumed = f", {corpus.num_resumed} documents from an earlier run" if corpus.num_resumed else ""
    terminal.print_line(f"{seconds:.1f} s, {tokens_per_s:.0f} tokens/s{resumed}")
