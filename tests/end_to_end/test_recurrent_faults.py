"""Faults of other engines with recurrent layers, class by class: each text is that of transformers token by token.

`docs/lossless.md` names the reports. All dead rows and states are NaN. `recurrent_mutants.py` plants faults of each
class in our own code, and the test of the class must notice.
"""

import asyncio
import copy
import json
import re
import threading
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from end_to_end.known_texts import DEPTH, Oracle, check, engine, known, module, oracle, params, text
from end_to_end.recurrent_mutants import MUTANTS
from end_to_end.tiny_llms import PIECES, tokenizer
from server.live_server import live_server

from foretoken import LLM, AsyncLLM, RequestOutput, SamplingParams
from foretoken.core.records import StepRecord

ARCHITECTURES = ("qwen3_5", "lfm2", "bamba", "falcon_h1")
RUNNERS = ("generic", "lean-native", "lean-stock")
# Every architecture on every runner, in chains and trees. Each pair of a runner and a shape once is not slow; those of
# lean-stock are, which chooses states by the same code as lean-native.
CASES = [
    pytest.param(architecture, *pair, marks=() if at == place else pytest.mark.slow)
    for place, architecture in enumerate(ARCHITECTURES)
    for at, pair in enumerate(product(RUNNERS, ("chain", "tree")))
]
on_all = pytest.mark.parametrize(("architecture", "runner", "shape"), CASES)
PROMPTS = [[7, 8, 9] * 4, [40, 3, 12, 9, 61, 17], list(range(3, 20)), [5]]
LONG = [3 + (5 * place) % 40 for place in range(30)]
OTHER = [60 - (7 * place) % 53 for place in range(22)]


def hits(outputs: list[RequestOutput]) -> list[int | None]:
    return [output.num_cached_tokens for output in outputs]


# States of rejected tokens

SCRIPTS = {
    "a step without drafts after accepted ones": (DEPTH, -1, 3, -1, -1),
    "all rejected": (0,),
    "all rejected, then nothing drafted": (0, -1),
    "fewer accepted than a window holds": (1, 2, -1),
}


@pytest.mark.parametrize("script", SCRIPTS)
@on_all
def test_the_state_of_a_rejected_token_is_gone(architecture: str, runner: str, shape: str, script: str) -> None:
    llm = engine(architecture, runner, shape, known(architecture, PROMPTS, 16), script=SCRIPTS[script])
    outputs = llm.generate(PROMPTS, params(16))
    check(architecture, outputs, 16)
    assert all(output.metrics.num_drafted > output.metrics.num_accepted for output in outputs)
    assert any(output.metrics.num_accepted for output in outputs) == (max(SCRIPTS[script]) > 0)


@on_all
def test_plain_decoding_is_transformers(architecture: str, runner: str, shape: str) -> None:
    del shape
    check(architecture, engine(architecture, runner, "none", []).generate(PROMPTS, params(24)), 24)


@on_all
def test_a_rollback_that_fails_is_not_ignored(architecture: str, runner: str, shape: str) -> None:
    """After a failed commit of a batch each request is decoded again alone; one whose commit never works ends."""
    llm = engine(architecture, runner, shape, known(architecture, PROMPTS, 24))
    commit, failures = llm.target.commit, [0]

    def fails_for_batches(slots: Any, *arguments: Any) -> None:
        if len(slots) > 1:
            failures[0] += 1
            raise RuntimeError("no rollback")
        commit(slots, *arguments)

    llm.target.commit = fails_for_batches  # type: ignore[method-assign, assignment]
    check(architecture, llm.generate(PROMPTS[:3], params(24)), 24)
    assert failures[0] > 3

    def fails(*arguments: Any) -> None:
        raise RuntimeError("no rollback")

    llm.target.commit = fails  # type: ignore[method-assign, assignment]
    (failed,) = llm.generate(OTHER, params(24))
    assert failed.outputs[0].finish_reason == "error"
    assert list(failed.outputs[0].token_ids) == text(architecture, OTHER, 1)


@on_all
def test_a_batch_that_runs_in_parts(architecture: str, runner: str, shape: str) -> None:
    """Every pass over drafts of several sequences fails, and each sequence then runs alone."""
    llm = engine(architecture, runner, shape, known(architecture, PROMPTS, 24))
    run, failures = llm.target.run, [0]

    def run_one(work: Any) -> Any:
        if len(work.slots) > 1 and len(work.tokens) > len(work.slots):
            failures[0] += 1
            raise RuntimeError("one sequence at a time")
        return run(work)

    llm.target.run = run_one  # type: ignore[method-assign]
    check(architecture, llm.generate(PROMPTS[:3], params(24)), 24)
    assert failures[0] > 3


@on_all
def test_a_text_that_begins_with_a_running_one(architecture: str, runner: str, shape: str) -> None:
    """Its state is copied from a slot whose last pass had accepted and rejected drafts."""
    texts = known(architecture, [LONG], 40)
    llm = engine(architecture, runner, shape, texts)
    stream, output, found = llm.stream(LONG, params(40)), list[int](), list[int | None]()
    for chunk in stream:
        output += chunk.token_ids
        if len(output) < 36:
            begun = [[*LONG, *output], [*LONG, *output[:-2], 44, 45]]
            texts += known(architecture, begun, 4)
            outputs = llm.generate(begun, params(4))
            check(architecture, outputs, 4)
            found += hits(outputs)[:1]
    assert output == text(architecture, LONG, 40)
    assert any(length is not None and length > len(LONG) for length in found)


# Prefix hits


def chat(architecture: str, llm: LLM, texts: list[list[int]], *, turns: int = 4) -> list[int | None]:
    """Two conversations, and hits of all turns."""
    prompts, found = [LONG, OTHER], list[int | None]()
    for turn in range(turns):
        texts[:0] = known(architecture, prompts, 8)
        outputs = llm.generate(prompts, params(8))
        check(architecture, outputs, 8)
        found += hits(outputs)
        prompts = [[*output.prompt_token_ids, *output.outputs[0].token_ids, 9, 5 + turn, 7] for output in outputs]
    return found


@on_all
def test_a_prefix_hit_has_the_state_of_its_position(architecture: str, runner: str, shape: str) -> None:
    texts: list[list[int]] = []
    found = chat(architecture, engine(architecture, runner, shape, texts), texts)
    want = [[0, 0], *([len(LONG) + 11 * turn - 4, len(OTHER) + 11 * turn - 4] for turn in range(1, 4))]
    assert found == [length for turn in want for length in turn], "other hits"


@on_all
def test_drafts_lose_no_hits(architecture: str, runner: str, shape: str) -> None:
    found: dict[str, list[int | None]] = {}
    for each in ("none", shape):
        texts = known(architecture, [LONG], 8)
        llm = engine(architecture, runner, each, texts)
        found[each] = [*chat(architecture, llm, texts, turns=2), *hits(llm.generate([LONG] * 2, params(8)))]
    assert found[shape] == found["none"]
    assert sum(length or 0 for length in found[shape]) > 2 * len(LONG)


@on_all
def test_a_prefix_without_a_state_is_read_again(architecture: str, runner: str, shape: str) -> None:
    """Keys and values of all its tokens are there. A text is cut inside its prompt, and inside its output."""
    texts = known(architecture, [LONG], 20)
    llm = engine(architecture, runner, shape, texts, max_num_seqs=1)
    output = text(architecture, LONG, 20)
    for cut in ([*LONG[:20], 1, 2, 3], LONG[:25], [*LONG, *output[:5], 50, 51], [*LONG, *output[:11]]):
        check(architecture, llm.generate(LONG, params(20)), 20)
        texts += known(architecture, [cut], 12)
        outputs = llm.generate(cut, params(12))
        check(architecture, outputs, 12)
        assert hits(outputs)[0] in (0, len(LONG) - 1), "other hits"


@on_all
def test_later_hits_are_of_the_same_text(architecture: str, runner: str, shape: str) -> None:
    """Two slots for five texts, each again and again and longer: states of earlier texts are replaced all the time."""
    texts = [
        [*(start + step * place for place in range(10 + start))]
        for start, step in ((3, 1), (4, 2), (5, 1), (6, 2), (7, 1))
    ]
    known_texts: list[list[int]] = []
    llm, found = engine(architecture, runner, shape, known_texts, max_num_seqs=2), 0
    for turn in range(3):
        for at in (turn, turn + 1, turn, turn + 2, turn + 1):
            prompt = texts[at]
            known_texts[:0] = known(architecture, [prompt], 6)
            outputs = llm.generate([prompt, prompt], params(6))
            check(architecture, outputs, 6)
            found += sum(length or 0 for length in hits(outputs))
            texts[at] = [*prompt, *outputs[0].outputs[0].token_ids, 50 + turn]
    assert found > 150


@pytest.mark.parametrize("has_stop", [True, False, "string"])
@on_all
def test_a_text_that_ends_inside_a_draft(architecture: str, runner: str, shape: str, has_stop: bool | str) -> None:
    """The target agrees with the whole draft; the state of the next turn is that of the shorter text."""
    output = text(architecture, LONG, 24)
    stop = next(at for at in range(7, 20) if output.index(output[at]) == at)
    texts = known(architecture, [LONG], 24)
    llm = engine(architecture, runner, shape, texts, script=(DEPTH,), max_num_seqs=1)
    asked = params(24, stop_token_ids=[output[stop]]) if has_stop else params(stop + 1)
    if has_stop == "string":
        llm = engine(
            architecture, runner, shape, texts, script=(DEPTH,), max_num_seqs=1, tokenizer=(codec := tokenizer())
        )
        told = [codec.decode(output[:count]) for count in range(25)]
        string = told[stop + 1][len(told[stop]) :] or told[stop][-1]
        stop = next(at for at in range(24) if string in told[at + 1])
        asked = params(24, stop=[string])
    (first,) = llm.generate(LONG, asked)
    assert list(first.outputs[0].token_ids) == output[: stop + 1]
    turn = [*LONG, *output[: stop + 1], 7, 8, 9]
    texts[:0] = known(architecture, [turn], 12)
    outputs = llm.generate(turn, params(12))
    check(architecture, outputs, 12)
    assert hits(outputs) == [len(turn) - 4], "other hits"


# Aborts, slots that are used again, completions of one prompt


@on_all
def test_a_slot_goes_on_after_an_abort(architecture: str, runner: str, shape: str) -> None:
    """Another text, then the aborted one from where it was, then from its beginning."""
    texts = known(architecture, [LONG], 40)
    llm = engine(architecture, runner, shape, texts, max_num_seqs=1)
    for num_chunks in (1, 2, 4):
        output: list[int] = []
        chunks = llm.stream(LONG, params(40))
        for _ in range(num_chunks):
            output += next(chunks).token_ids
        chunks.close()
        for prompt in ([*LONG, *output], OTHER, LONG):
            texts += known(architecture, [prompt], 12)
            check(architecture, llm.generate(prompt, params(12)), 12)


@on_all
def test_a_prompt_that_was_half_read(architecture: str, runner: str, shape: str) -> None:
    """Its request is aborted beside one that decodes. The same prompt comes again, then another one."""
    texts = known(architecture, [PROMPTS[1]], 60) + known(architecture, [OTHER, LONG], 20)
    llm = engine(architecture, runner, shape, texts, max_num_seqs=2, max_num_batched_tokens=2)

    async def outputs() -> list[RequestOutput]:
        server = AsyncLLM(llm)
        running, aborted = server.submit(PROMPTS[1], params(60)), server.submit(LONG, params(60))
        for _ in range(3):
            await anext(running)
        assert llm._engine._scheduler.running[1].num_cached in range(1, len(LONG)), "it is not half read"
        aborted.abort()
        done = [await server.submit(prompt, params(20)).output() for prompt in (LONG, OTHER)]
        done.append(await running.output())
        await asyncio.to_thread(server.close)
        return done

    *others, first = asyncio.run(outputs())
    check(architecture, others, 20)
    check(architecture, [first], 60)


@on_all
def test_slots_are_used_again(architecture: str, runner: str, shape: str) -> None:
    """Many short texts through two slots, none of which may see a record of the one before."""
    prompts = [[place, *range(40, 40 + place % 5)] for place in range(3, 17)]
    llm = engine(architecture, runner, shape, known(architecture, prompts, 9), max_num_seqs=2)
    check(architecture, llm.generate(prompts, params(9)), 9)


@on_all
def test_completions_of_one_prompt(architecture: str, runner: str, shape: str) -> None:
    """Drawn, but from one token: all four are the greedy text. Three copy the state before the prompt's last token."""
    llm = engine(architecture, runner, shape, known(architecture, [LONG, OTHER], 20), max_num_seqs=4)
    drawn = SamplingParams(temperature=0.9, top_k=1, seed=4, n=4, max_tokens=20, ignore_eos=True)
    outputs = llm.generate([LONG, OTHER], drawn)
    check(architecture, outputs, 20)
    assert [output.metrics.num_cached_tokens for output in outputs] == [3 * (len(LONG) - 1), 3 * (len(OTHER) - 1)]


# Streaming and structured output


@on_all
def test_streams(architecture: str, runner: str, shape: str) -> None:
    """Two at once, and one more that is closed; what comes in chunks is the text."""
    llm = engine(architecture, runner, shape, known(architecture, [LONG, OTHER], 30))
    closed, *streams = (llm.stream(prompt, params(30)) for prompt in (PROMPTS[0], LONG, OTHER))
    got: list[list[int]] = [[], []]
    while min(map(len, got)) < 30:
        for at, stream in enumerate(streams):
            got[at] += next(stream).token_ids if len(got[at]) < 30 else []
        if 6 < len(got[0]) < 12:
            next(closed)
        elif len(got[0]) >= 12:
            closed.close()
    for prompt, output in zip((LONG, OTHER), got, strict=True):
        assert output == text(architecture, prompt, 30), "another text than the target's"


@on_all
def test_streams_of_the_server(architecture: str, runner: str, shape: str) -> None:
    """Two turns: the second one begins with the first, streamed too."""
    texts = known(architecture, [LONG], 12)
    llm = engine(architecture, runner, shape, texts, tokenizer=tokenizer())
    with live_server(llm) as server:
        prompt = LONG
        for _ in range(2):
            texts[:0] = known(architecture, [prompt], 12)
            body = {
                "model": "tinycode", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True,
                "stream": True, "return_token_ids": True,
            }  # fmt: skip
            lines = server.post("/v1/completions", body).text.splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            output = [token for event in events for each in event["choices"] for token in each.get("token_ids") or ()]
            assert output == text(architecture, prompt, 12), "another text than the target's"
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            prompt = [*prompt, *output, 8, 9]


CHOICES = [f"{a}{b}.kmn.{c}pqr{d}." for a, b, c, d in product("cdf", "jl", "uvw", "xyz")]


def allowed(output: list[int]) -> list[int]:
    """Tokens that lead on to one of the choices; none behind a whole one."""
    begun = b"".join(bytes(PIECES[token]) for token in output)  # type: ignore[arg-type]
    pieces = {token: piece for token, piece in enumerate(PIECES) if isinstance(piece, bytes)}
    return [t for t, piece in pieces.items() if any(each.encode().startswith(begun + piece) for each in CHOICES)]


@on_all
def test_structured_output(architecture: str, runner: str, shape: str) -> None:
    """The target chooses four letters; those between them are forced, and are read as drafts."""
    form = params(40, structured_outputs={"choice": CHOICES})
    want = [oracle(architecture).text(prompt, 40, allowed) for prompt in PROMPTS]
    texts = [[*prompt, *output] for prompt, output in zip(PROMPTS, want, strict=True)]
    llm = engine(architecture, runner, shape, texts, tokenizer=tokenizer())
    outputs = llm.generate([*PROMPTS, LONG], [form] * len(PROMPTS) + [params(20)])
    assert [list(output.outputs[0].token_ids) for output in outputs[:-1]] == want, "another text than the target's"
    assert sum(output.metrics.num_accepted for output in outputs) > 3 * len(PROMPTS)
    check(architecture, outputs[-1:], 20)


# Boundaries: of chunks, of sequences in a pass, of the context


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
@on_all
def test_chunks_of_prompts(architecture: str, runner: str, shape: str, budget: int) -> None:
    """Shorter than the window, as long, longer, as long as a chain and a tree, and past 64 tokens; one at a time."""
    prompts = [[5 + place % 50 for place in range(length)] for length in (1, 2, 3, 4, 6, 8, 11, 65)]
    texts = known(architecture, prompts, 6)
    llm = engine(architecture, runner, shape, texts, max_num_seqs=1, max_num_batched_tokens=budget)
    check(architecture, llm.generate(prompts, params(6)), 6)


@pytest.mark.parametrize("budget", [7, 12, 64])
@on_all
def test_decode_rows_beside_chunks(architecture: str, runner: str, shape: str, budget: int) -> None:
    """Chunks of one token, of as many as a chain has, and whole prompts, beside trees and single tokens."""
    records: list[StepRecord] = []
    texts = known(architecture, [*PROMPTS, LONG, OTHER], 60)
    llm = engine(architecture, runner, shape, texts, max_num_batched_tokens=budget, on_step=records.append)
    stream, output = llm.stream(PROMPTS[1], params(60)), list[int]()
    for _ in range(3):
        output += next(stream).token_ids
    check(architecture, llm.generate([LONG, OTHER, PROMPTS[2]], params(12)), 12)
    output += [token for chunk in stream for token in chunk.token_ids]
    assert output == text(architecture, PROMPTS[1], 60), "another text than the target's"
    mixed = [each for each in records if each.num_prompt_tokens and not all(s.ends_prompt for s in each.sequences)]
    is_drafted = {bool(step.num_drafted) for each in mixed for step in each.sequences if not step.ends_prompt}
    assert len(is_drafted) == (2 if budget < 64 else 1)  # one pass reads all


@on_all
def test_sequences_of_other_widths_in_a_pass(architecture: str, runner: str, shape: str) -> None:
    """Prompts of 1 to 30 tokens in one pass, and trees of 1 to 11 nodes: nothing that fills up a row is read."""
    records: list[StepRecord] = []
    prompts = [[5], LONG, PROMPTS[1], OTHER]
    texts = known(architecture, prompts, 24)
    llm = engine(architecture, runner, shape, texts, max_num_seqs=4, on_step=records.append)
    check(architecture, llm.generate(prompts, params(24)), 24)
    assert max(len({step.num_drafted for step in each.sequences}) for each in records) > 1


@on_all
def test_a_draft_that_ends_at_the_context(architecture: str, runner: str, shape: str) -> None:
    """The text that is drafted goes on behind the context."""
    for room in (1, 2, 4, 9):
        texts = known(architecture, PROMPTS[:2], 24)
        longest = max(map(len, PROMPTS[:2]))
        llm = engine(architecture, runner, shape, texts, script=(DEPTH,), max_model_len=longest + room)
        for output, prompt in zip(llm.generate(PROMPTS[:2], params(60)), PROMPTS[:2], strict=True):
            want = text(architecture, prompt, 24)[: longest + room - len(prompt)]
            assert list(output.outputs[0].token_ids) == want, "another text than the target's"
            assert output.outputs[0].finish_reason == "length"


# Preemption, weights, salts


@on_all
def test_a_preempted_request_goes_on(architecture: str, runner: str, shape: str) -> None:
    """A client has both slots when another one comes."""
    prompts, asked, there = [LONG, OTHER, PROMPTS[0]], threading.Event(), threading.Event()
    records: list[StepRecord] = []

    def hold(record: StepRecord) -> None:
        records.append(record)
        if len(records) == 4:
            there.set()
            asked.wait(60)

    llm = engine(architecture, runner, shape, known(architecture, prompts, 40), max_num_seqs=2, on_step=hold)

    async def outputs() -> list[RequestOutput]:
        server = AsyncLLM(llm)
        streams = [server.submit(prompt, params(40), client="many") for prompt in prompts[:2]]
        await asyncio.to_thread(there.wait, 60)
        streams.append(server.submit(prompts[2], params(40), client="one"))
        asked.set()
        done = [await stream.output() for stream in streams]
        await asyncio.to_thread(server.close)
        return done

    done = asyncio.run(outputs())
    check(architecture, done, 40)
    assert sum(output.metrics.num_preemptions for output in done) == 1


@on_all
def test_all_are_preempted_and_read_again(architecture: str, runner: str, shape: str) -> None:
    """After every third iteration all rows and states are dropped."""
    llm = engine(architecture, runner, shape, known(architecture, PROMPTS[:3], 24))
    got: list[list[int]] = [[], [], []]
    for at, chunk in enumerate(llm.stream(PROMPTS[:3], params(24))):
        got[chunk.prompt_index] += chunk.token_ids
        if at % 9 == 8:
            assert llm.reset_prefix_cache()
    assert got == [text(architecture, prompt, 24) for prompt in PROMPTS[:3]], "another text than the target's"
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    assert values["vllm:num_preemptions"] > 6


def rewrite(model: Any) -> None:
    """Writes to all weights in place."""
    model.load_state_dict({name: each.flip(0) * 1.1 for name, each in model.state_dict().items()})


@cache
def rewritten(architecture: str) -> Oracle:
    """The oracle of the new weights."""
    model = copy.deepcopy(module(architecture))
    rewrite(model)
    return Oracle(model)


@on_all
def test_states_of_old_weights_are_not_used(architecture: str, runner: str, shape: str) -> None:
    """A running text is read again and goes on with the new weights; a finished text's prefix is dropped."""
    target = copy.deepcopy(module(architecture))
    texts = known(architecture, [LONG, OTHER], 24)
    llm = engine(architecture, runner, shape, texts, target=target)
    check(architecture, llm.generate([OTHER], params(24)), 24)
    output, num_before = list[int](), 0
    for chunk in llm.stream(LONG, params(24)):
        output += chunk.token_ids
        if not num_before and len(output) >= 5:
            num_before = len(output)
            rewrite(target)
    assert output[:num_before] == text(architecture, LONG, num_before)
    rest = rewritten(architecture).text([*LONG, *output[:num_before]], 24 - num_before)
    assert output[num_before:] == rest, "another text than the target's"
    assert rest != text(architecture, LONG, 24)[num_before:]
    (again,) = llm.generate(OTHER, params(8))
    want = rewritten(architecture).text(OTHER, 8)
    assert list(again.outputs[0].token_ids) == want, "another text than the target's"
    assert again.num_cached_tokens == 0


@on_all
def test_texts_with_another_salt_share_no_state(architecture: str, runner: str, shape: str) -> None:
    llm, found = engine(architecture, runner, shape, known(architecture, [LONG], 8)), list[int | None]()
    for salt in (None, "mine", "yours", "mine", None):
        outputs = llm.generate({"prompt_token_ids": LONG, "cache_salt": salt}, params(8))
        check(architecture, outputs, 8)
        found += hits(outputs)
    assert found == [0, 0, 0, len(LONG) - 1, len(LONG) - 1], "other hits"


# What shows that these tests can fail, and that the page names them


@pytest.mark.parametrize(
    ("mutant", "runner"),
    [
        pytest.param(mutant, runner, marks=pytest.mark.slow if runner == "lean-stock" and at % 9 else ())
        for at, mutant in enumerate(MUTANTS)
        for runner in RUNNERS
    ],
)
def test_planted_faults_are_noticed(mutant: str, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, scenario, sign, more = MUTANTS[mutant]
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=sign):
        globals()[scenario]("qwen3_5", runner, "tree", **more)


def test_the_page_names_every_test() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lossless.md").read_text(encoding="utf-8")
    (rows,) = re.findall(r"^## Reported faults of recurrent layers\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    here = {name for name in globals() if name.startswith("test_")} - {
        "test_planted_faults_are_noticed", "test_the_page_names_every_test",
    }  # fmt: skip
    assert set(re.findall(r"`(test_\w+)`", rows)) == here
