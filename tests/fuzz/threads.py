"""Threads: random calls, streams, closes and mistakes of several threads on one engine, each answered as alone."""

import random
import threading
from typing import NamedTuple

from tiny_models import CONTEXT_LEN

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ForetokenError
from foretoken.core.results import CompletionOutput
from fuzz import engines, values
from fuzz.worker import Case, FindingError, check_refusal


class Job(NamedTuple):
    """One call of a thread.

    Attributes:
        kind: "generate", "stream", "close", "forget" or "mistake".
        prompt: Token ids.
        params: Greedy or seeded.
        want: What plain decoding answers.
    """

    kind: str
    prompt: list[int]
    params: SamplingParams
    want: list[CompletionOutput]


def run(case: Case) -> None:
    """Two to eight threads with up to five calls each."""
    rng, settings = case.rng, case.settings
    setup = engines.drawn_setup(rng, engines.Target.of(settings))._replace(rule="auto", control=None)
    work = [[_job(case, setup) for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(2, 8))]
    case.size = sum(map(len, work))
    case.note(f"{len(work)} threads, {setup}: {[[job.kind for job in jobs] for jobs in work]}")
    references = [[*job.prompt, *job.want[0].token_ids] for jobs in work for job in jobs]
    engine, _ = engines.engine_with(setup, references)
    found: list[Exception] = []

    def do(jobs: list[Job]) -> None:
        try:
            for job in jobs:
                _do(engine, job, setup)
        except Exception as err:  # noqa: BLE001 - raised again in the main thread
            found.append(err)

    threads = [threading.Thread(target=do, args=(jobs,), daemon=True) for jobs in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if found:
        raise found[0]
    engines.check_idle(engine, setup)


def _job(case: Case, setup: engines.Setup) -> Job:
    """A call whose answer is known."""
    rng = case.rng
    fields = {name: value for name, value in values.sampling_fields(rng).items() if name != "logprobs"}
    if fields.get("temperature") != 0.0:
        fields["seed"] = rng.randrange(100)
    prompt = values.tokens(rng, 1, min(setup.context_len or CONTEXT_LEN, 20) - 1)
    params = SamplingParams(**fields)
    want = list(engines.alone(setup.target, setup.context_len, prompt, params).outputs)
    return Job(rng.choice(["generate", "generate", "stream", "close", "forget", "mistake"]), prompt, params, want)


def _do(engine: LLM, job: Job, setup: engines.Setup) -> None:
    """Makes a call and checks its answer."""
    if job.kind == "mistake":
        try:
            engine.generate([job.prompt, []], job.params)
        except ForetokenError as err:
            check_refusal(err)
            return
        raise FindingError("an empty prompt was taken")
    if job.kind == "generate":
        for got, want in zip(engine.generate([job.prompt], job.params)[0].outputs, job.want, strict=True):
            engines.check_same(got, want, setup.target)
        return
    most = {"stream": 1 << 30}.get(job.kind, random.Random(len(job.prompt)).randrange(4))
    stream = engine.stream([job.prompt], job.params)
    got_ids: dict[int, list[int]] = {want.index: [] for want in job.want}
    for _, chunk in zip(range(most), stream, strict=False):
        got_ids[chunk.index] += chunk.token_ids
    if job.kind == "close":
        stream.close()  # type: ignore[attr-defined]
    for want in job.want:
        got = got_ids[want.index]
        if want.token_ids[: len(got)] != got or (job.kind == "stream" and len(got) != len(want.token_ids)):
            raise FindingError(f"{job.kind}: {got} instead of {want.token_ids}")
