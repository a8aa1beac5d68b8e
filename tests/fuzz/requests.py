"""Requests: every sampling parameter, every form of prompt, good and bad ones in a batch, any engine, closed streams.

What is accepted gets the answer of plain decoding alone by the same target, whose weights and KV rows may be rounded;
what is not is refused in one sentence; afterwards the engine is idle and right.
"""

import random
from collections import defaultdict
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from tiny_models import CONTEXT_LEN, VOCAB_SIZE
from transformers import BatchEncoding

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.core.errors import ForetokenError
from fuzz import engines, options, values
from fuzz.engines import shown
from fuzz.worker import Case, FindingError, check_refusal


class Ask(NamedTuple):
    """One prompt with its parameters, as a caller gives them.

    Attributes:
        prompt: In any form.
        ids: What it means, or None where it means nothing.
        params: Or None where they were refused.
        must_be_taken: Whether nothing about it may be refused, but for its length.
    """

    prompt: Any
    ids: list[int] | None
    params: SamplingParams | None
    must_be_taken: bool


class Engine(NamedTuple):
    """An engine and how it was set up."""

    llm: LLM
    setup: engines.Setup

    def alone(self, ids: list[int], params: SamplingParams) -> RequestOutput:
        """What plain decoding answers."""
        return engines.alone(self.setup.target, self.setup.context_len, ids, params)

    def has_text_of(self, params: SamplingParams) -> bool:
        """Whether that is what it has to answer."""
        return engines.is_text_fixed(params, self.setup.rule)


def run(case: Case) -> None:
    """One engine with one to three batches; one case in eight is about the engine's own arguments."""
    case.size = 0
    torch.set_num_threads(1)  # the case before may have had more
    if case.rng.random() < 0.125:
        options.run(case)
        return
    target = engines.drawn_target(case.rng, case.settings)
    case.note(f"plain engine: {target}")
    try:
        setup = engines.drawn_setup(case.rng, target)
        engines.plain(target, setup.context_len)
    except ForetokenError as err:
        case.size = 1
        case.count("targets refused")
        check_refusal(err)
        return
    batches = [[_ask(case, target) for _ in range(case.rng.randint(1, 4))] for _ in range(case.rng.randint(1, 3))]
    references = [_reference(ask, setup) for ask in chain(*batches) if _is_served(ask, setup.context_len)]
    case.note(f"engine: {setup}")
    try:
        engine = Engine(*engines.engine_with(setup, references))
    except ForetokenError as err:
        case.size = 1
        case.count("combinations refused")
        check_refusal(err)
        return
    for name, value in engine.setup.values().items():
        case.count(f"{name} {value}")
    for batch in batches:
        case.size += len(batch)
        case.note(f"engine: {setup}; " + "; ".join(f"prompt {shown(a.prompt)} {shown(a.params)}" for a in batch))
        _serve(case, engine, batch)
        engines.check_idle(engine.llm, engine.setup)
    case.count("combinations compared" if case.counts.get("answers compared") else "combinations without a fixed text")


def _is_served(ask: Ask, context_len: int | None) -> bool:
    """Whether a request is fine."""
    return ask.must_be_taken and ask.ids is not None and len(ask.ids) < (context_len or CONTEXT_LEN)


def _reference(ask: Ask, setup: engines.Setup) -> list[int]:
    """What plain decoding makes of it, for oracles."""
    assert ask.ids is not None
    assert ask.params is not None
    output = engines.alone(setup.target, setup.context_len, ask.ids, ask.params)
    return [*ask.ids, *output.outputs[0].token_ids]


def _ask(case: Case, target: engines.Target) -> Ask:
    """A request; two in three are fine."""
    rng = case.rng
    spoil_params, spoil_prompt = rng.random() < 0.15, rng.random() < 0.06
    fields = values.spoilt_fields(rng) if spoil_params else values.sampling_fields(rng)
    prompt, ids = (values.odd(rng), None) if spoil_prompt else _prompt(rng, target)
    params = None
    case.note(f"SamplingParams(**{shown(fields)})")
    try:
        params = SamplingParams(**fields)
    except ForetokenError as err:
        check_refusal(err)
        case.count("parameters refused")
        if not spoil_params:
            raise FindingError(f"valid parameters were refused: {err}") from err
    for name in () if params is None else fields:
        case.count(f"requests with {name}")
    return Ask(prompt, ids, params, must_be_taken=not (spoil_params or spoil_prompt))


def _prompt(rng: random.Random, target: engines.Target) -> tuple[Any, list[int] | None]:
    """A prompt in any form, and its token ids where it is fine."""
    ids = values.tokens(rng, 1, rng.choice([3, 6, 6, 14, 30, CONTEXT_LEN + 3]))
    words = values.text(rng, 1, 9)
    of_words = list(target.tokenizer(words)["input_ids"])
    outside = [*ids, rng.choice([-1, len(target.tokenizer), 2**31, 2**63, -(2**70), 10**400])]
    forms: list[tuple[Any, list[int] | None]] = [
        (ids, ids), (ids, ids), (tuple(ids), ids), (np.array(ids), ids), (np.array(ids, dtype=np.uint8), ids),
        (torch.tensor(ids), ids), (torch.tensor(ids, dtype=torch.int32), ids), ([np.int64(i) for i in ids], ids),
        (range(3, 3 + len(ids)), list(range(3, 3 + len(ids))) if len(ids) < VOCAB_SIZE - 3 else None),
        ({"prompt_token_ids": ids}, ids), ({"prompt_token_ids": torch.tensor(ids)}, ids),
        ({"prompt_token_ids": ids, "prompt": "said otherwise"}, ids), (words, of_words), ({"prompt": words}, of_words),
        ({"prompt_token_ids": ids, "prediction": values.tokens(rng, 1, 6), "cache_salt": words}, ids),
        ({"prompt": words, "prediction": tuple(ids[:6]), "cache_salt": None}, of_words),
        ({"prompt_token_ids": ids, "speculative": {"enabled": rng.random() < 0.3}}, ids),
        ({"prompt_token_ids": ids, "speculative": {"max_nodes": rng.choice([1, 2, 5, 64])}}, ids),
        ([], None), ("", None), ("\ud800", None), ([float(i) for i in ids], None), ([True], None), ([ids], None),
        (outside, None), (np.eye(2), None), (torch.tensor(3), None), ({"prompt": ids, "x": 1}, None), (b"abc", None),
        ({"prompt": ""}, None), ({"prompt_token_ids": []}, None), ({"prompt_token_ids": None}, None), ("漢字", None),
        ({"prompt": words, "prediction": outside}, None), ({"prompt": words, "prediction": b"a"}, None),
        ({"prompt": words, "cache_salt": ""}, None), ({"prompt_token_ids": ids, "cache_salt": 5}, None),
    ]  # fmt: skip
    return forms[rng.randrange(18)] if rng.random() < 0.9 else rng.choice(forms[18:])


def _serve(case: Case, engine: Engine, batch: list[Ask]) -> None:
    """Serves a batch, and each of its requests alone where the batch is refused."""
    usable, context_len = [ask for ask in batch if ask.params is not None], engine.setup.context_len
    if not usable:
        return
    try:
        _check_batch(case, engine, usable)
        return
    except ForetokenError as err:
        check_refusal(err)
        if all(_is_served(ask, context_len) for ask in usable):
            raise FindingError(f"a batch of valid requests was refused: {err}") from err
    for ask in usable:
        try:
            _check_batch(case, engine, [ask])
        except ForetokenError as err:
            check_refusal(err)
            case.count("requests refused")
            if _is_served(ask, context_len):
                raise FindingError(f"a valid request was refused: {err}") from err


def _check_batch(case: Case, engine: Engine, batch: list[Ask]) -> None:
    """Serves a batch in one of the ways there are; `ForetokenError` when it is refused."""
    rng = case.rng
    params: Any = [ask.params for ask in batch]
    prompts: Any = [ask.prompt for ask in batch]
    if all(ask.must_be_taken and ask.ids for ask in batch) and rng.random() < 0.2:
        prompts = _encoded(rng, [ask.ids for ask in batch])
    if rng.random() < 0.3:
        _check_stream(case, engine, batch, prompts, params)
        return
    outputs = engine.llm.generate(prompts, params)
    if len(outputs) != len(batch):
        raise FindingError(f"{len(outputs)} results for {len(batch)} prompts")
    for ask, output in zip(batch, outputs, strict=True):
        assert ask.params is not None
        if ask.ids is not None and output.prompt_token_ids != ask.ids:
            raise FindingError(f"prompt {shown(ask.prompt)} was read as {output.prompt_token_ids}")
        ids, vocab_size = output.prompt_token_ids, engine.llm.target.vocab_size
        want = engine.alone(ids, ask.params)
        case.count("answers")
        if output.metrics.num_accepted:
            case.count("answers with accepted tokens")
        if output.metrics.num_preemptions:
            case.count("answers after preemptions")
        for got, other in zip(output.outputs, want.outputs, strict=True):
            engines.check_valid(got, ids, ask.params, engine.setup.context_len, vocab_size)
            if engine.has_text_of(ask.params):
                case.count("answers compared")
                engines.check_same(got, other, engine.setup.target)


def _encoded(rng: random.Random, rows: list[Any]) -> Any:
    """Several prompts as a tokenizer gives them, padded left or right."""
    longest = max(map(len, rows))
    is_left = rng.random() < 0.5
    pads = [[0] * (longest - len(row)) for row in rows]
    ids = [pad + row if is_left else row + pad for row, pad in zip(rows, pads, strict=True)]
    mask = [pad + [1] * len(row) if is_left else [1] * len(row) + pad for row, pad in zip(rows, pads, strict=True)]
    data: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    form = rng.choice([None, np.array, torch.tensor])
    return BatchEncoding(data if form is None else {key: form(value) for key, value in data.items()})


def _check_stream(case: Case, engine: Engine, batch: list[Ask], prompts: Any, params: Any) -> None:
    """Streams a batch, to its end or not; what came is the beginning of the answer."""
    stop_after = case.rng.choice([None, None, 0, 1, 2, 5, 9])
    stream = engine.llm.stream(prompts, params)
    ids: dict[tuple[int, int], list[int]] = defaultdict(list)
    text: dict[tuple[int, int], str] = defaultdict(str)
    ended: set[tuple[int, int]] = set()
    for count, chunk in enumerate(stream):
        key = (chunk.prompt_index, chunk.index)
        if key in ended:
            raise FindingError(f"a chunk of {key} after its last one")
        ids[key] += chunk.token_ids
        text[key] += chunk.text
        ended |= {key} if chunk.finish_reason is not None else set()
        if count == stop_after:
            break
    stream.close()  # type: ignore[attr-defined]
    case.count("streams" if stop_after is None else "streams closed early")
    for (place, index), got in ids.items():
        ask = batch[place]
        assert ask.params is not None
        if ask.ids is None or not engine.has_text_of(ask.params):
            continue
        want = engine.alone(ask.ids, ask.params).outputs[index]
        said = text[place, index]
        is_whole = (place, index) in ended
        same = (got, said) == (want.token_ids, want.text) if is_whole else want.token_ids[: len(got)] == got
        if not same or not want.text.startswith(said):
            raise FindingError(f"streamed {got} {said!r} instead of {want.token_ids} {want.text!r}")
        case.count("answers compared")
    if stop_after is None and len(ended) != sum(int(p.n) for p in params):
        raise FindingError(f"the streams of {sorted(ended)} ended, and no others")
