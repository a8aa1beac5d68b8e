"""Plays controllers against worlds that were recorded with real models, and checks the simulator against the engine.

    python -m benchmarks.recorded models/tinycode -s ngram:chain -s draft_model:chain [--num-prompts 6] [--control NAME]

The target writes greedy texts. Every drafter drafts a chain of eight levels after each of their tokens. Seconds of
passes, drafts and host are measured once. There is a world for each drafter, and one for all together.

`tokens a pass` compares the simulator with the engine for drafts of a fixed depth: both follow the same text. `share`
is the controller's speed divided by that of the best fixed setting.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.simulator import Recording, SimulatedDrafter, World, compare, controller_of
from foretoken import LLM, SamplingParams
from foretoken.bench.workload import load_prompts
from foretoken.drafting.costs import fastest_by_depth
from foretoken.drafting.draft_timing import time_drafts
from foretoken.entrypoints.config import parse_setup
from foretoken.models.loading import load_model, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.records import StepRecord

DEEPEST, CHECKED = 8, 4  # levels of recorded drafts, and of those that are compared with the engine


class Text(NamedTuple):
    """A prompt's tokens, and the tokens that the target wrote."""

    prompt: list[int]
    written: list[int]


def params(max_tokens: int) -> SamplingParams:
    """Greedy decoding of as many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def chain(config: dict[str, Any], depth: int) -> dict[str, Any]:
    """Returns a drafter's configuration with a fixed depth."""
    return {**config, "num_speculative_tokens": depth}


def record(make: Any, config: dict[str, Any], texts: Sequence[Text]) -> Recording:
    """Returns a drafter's drafts after every token of the texts.

    Args:
        make: Makes an engine from a configuration and a function that hears of each iteration.
        config: Of the drafter.
        texts: Of the target.
    """
    found: dict[str, tuple[int, tuple[float, ...] | None]] = {}

    def note(record: StepRecord) -> None:
        for step in record.sequences:
            if not step.ends_prompt and step.request_id not in found:
                assert step.trace is not None
                scores = step.trace.scores
                found[step.request_id] = (
                    step.num_accepted if step.tree_depth else -1,
                    None if scores is None or not step.tree_depth else tuple(scores[1:]),
                )

    engine = make(chain(config, DEEPEST), note, trace=True)
    right: list[int] = []
    scores: list[tuple[float, ...] | None] = []
    for text in texts:
        for end in range(len(text.written)):
            output = engine.generate([*text.prompt, *text.written[:end]], params(DEEPEST + 2))[0]
            levels, values = found[output.request_id]
            right.append(levels)
            scores.append(values)
    if any(values is not None for values in scores):
        padded = [(*(values or ()), *[-99.0] * (DEEPEST - len(values or ()))) for values in scores]
        return Recording(tuple(right), tuple(padded))
    return Recording(tuple(right))


def tokens_a_pass(make: Any, config: dict[str, Any], texts: Sequence[Text], depth: int) -> float:
    """Returns the tokens a pass of the engine with drafts of a fixed depth."""
    records: list[StepRecord] = []
    engine = make(chain(config, depth), records.append)
    for text in texts:
        engine.generate(text.prompt, params(len(text.written)))
    steps = [step for record in records for step in record.sequences if not step.ends_prompt]
    return sum(step.num_accepted + 1 for step in steps) / len(steps)


def simulated_tokens_a_pass(world: World, texts: Sequence[Text], depth: int) -> float:
    """Returns the same of the simulator, text by text."""
    (drafter,) = world.drafters
    assert drafter.recorded is not None
    passes = tokens = begin = 0
    for text in texts:
        at = begin
        begin += len(text.written)
        while at < begin - 1:  # the first token came with the prompt; nothing follows the last one
            passes, tokens = passes + 1, tokens + 1 + min(max(drafter.recorded.right[at], 0), depth)
            at += 1 + min(max(drafter.recorded.right[at], 0), depth)
    return tokens / passes


def main(arguments: list[str]) -> int:
    """Records, plays and prints; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recorded", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("model")
    parser.add_argument("-s", dest="setups", action="append", required=True)
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompts", default="heldout")
    parser.add_argument("--control", choices=("goodput", "heuristic", "smartspec"), default="goodput")
    options = parser.parse_args(arguments)
    model, tokenizer = load_model(options.model), load_tokenizer(options.model)

    def make(config: dict[str, Any] | None, on_step: Any = None, **keys: Any) -> LLM:
        return LLM(
            model, tokenizer=tokenizer, speculative_config=config, max_num_seqs=1, on_step=on_step,
            enable_prefix_caching=False, **keys,
        )  # fmt: skip

    records: list[StepRecord] = []
    plain, texts = make(None, records.append), list[Text]()
    for prompt in load_prompts(options.prompts, limit=options.num_prompts):
        output = plain.generate(prompt, params(options.max_tokens))[0]
        texts.append(Text(list(output.prompt_token_ids), list(output.outputs[0].token_ids)))
    host_s = median(each.seconds.accept + each.seconds.commit for each in records)
    widths, seconds = zip(*plain.handle.costs.points, strict=True)
    unit = seconds[0]  # a second of the simulator is a pass of one token
    curve = tuple(widths), tuple(each / unit for each in seconds)
    worlds: list[World] = []
    for name in options.setups:
        config = dict(parse_setup(name, target=options.model).config or {})
        engine = make(chain(config, DEEPEST))
        fastest = fastest_by_depth(time_drafts(engine.drafters[0], engine.handle)) or {1: 0.0}
        low, high = min(fastest), max(fastest)
        level = max(fastest[high] - fastest[low], 0.0) / max(high - low, 1)
        recording = record(make, config, texts)
        drafter = SimulatedDrafter(
            recorded=recording,
            deepest=DEEPEST,
            level_s=level / unit,
            fixed_s=max(fastest[low] - level * low, 0.0) / unit,
        )
        worlds.append(World(name=name, drafters=[drafter], curve=curve, host=(host_s / unit, 0.0)))
        ours, theirs = simulated_tokens_a_pass(worlds[-1], texts, CHECKED), tokens_a_pass(make, config, texts, CHECKED)
        print(f"{name}: tokens a pass at depth {CHECKED}: simulator {ours:.3f}, engine {theirs:.3f}", flush=True)
    if len(worlds) > 1:
        worlds.append(
            World(name="together", drafters=[world.drafters[0] for world in worlds], curve=curve, host=worlds[0].host)
        )
    print(
        "| world | best fixed depths | best gain | gain | share, median | share, least | early |\n" + "|---" * 7 + "|"
    )
    for world in worlds:
        policy = partial(controller_of, control=options.control)
        played = [compare(world, policy, seed) for seed in range(5)]
        depths = ", ".join(f"{index}: {depth}" for index, depth in played[0].setting.items()) or "none"
        print(
            f"| {world.name} | {depths} | {median(each.best for each in played):.2f} "
            f"| {median(each.gain for each in played):.2f} | {median(each.share for each in played):.3f} "
            f"| {min(each.share for each in played):.3f} | {median(each.early for each in played):.2f} |",
            flush=True,
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
