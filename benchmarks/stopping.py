"""Compares policies of the draft length on logged drafts of one draft model or head, by measured costs.

    python -m benchmarks.stopping [MODEL] -s draft_model --out benchmarks/results/stopping

The stop rules are trained on code and edits. Every policy is then replayed on held-out code and prose, twice: by the
seconds of this machine, where rules draft level by level, and as if a level of a rule cost no more than a level of a
whole chain. With `--level` seconds are assumed instead, the same for all policies, and load of the machine plays no
part. `oracle` drafts exactly the tokens that are accepted. The best fixed length is chosen on the test texts
themselves. After the sign ± stands the jackknife standard error over texts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.rivals.machine import commit, describe_machine
from foretoken.bench.workload import Workload, load_prompts
from foretoken.core.records import AskedDrafter, SequenceStep, StageSeconds, StepRecord
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.library import set_num_threads
from foretoken.drafting.goodput import Goodput
from foretoken.drafting.policies import Heuristic, SmartSpec
from foretoken.entrypoints.config import parse_setup, parse_speculative_config
from foretoken.models.loading import load_model, load_tokenizer
from foretoken.runner.costs import CostCurve
from foretoken.training import stopping
from foretoken.training.stopping import IterationSeconds
from foretoken.trees.stopping import STOP_CONTROLS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from foretoken.drafting.base import Controller
    from foretoken.training.stopping import LoggedText

_DEPTH = 16
_CONTROLS = ("fixed", *STOP_CONTROLS)
_DRAFT_S, _TOKEN_S = 0.05, 0.02  # of `--level`: of any draft, and of a verified token; a memory-bound target


def _assumed(level: float) -> IterationSeconds:
    lengths = range(1, _DEPTH + 1)
    return IterationSeconds(
        [0.0, *(_DRAFT_S + level * n for n in lengths)], [1.0, *(1 + _TOKEN_S * n for n in lengths)]
    )


@lru_cache
def _chain(depth: int) -> TokenTree:
    return TokenTree.from_rows([TreeRow(list(range(depth + 1)), list(range(-1, depth)))])


class _Played:
    """A controller that is asked for every length, and learns what became of the draft."""

    def __init__(self, controller: Controller, seconds: IterationSeconds) -> None:
        self._controller, self._seconds = controller, seconds

    def lengths(self, text: LoggedText) -> list[int]:
        """Returns the lengths of one text; positions where no draft begins get 0."""
        lengths, start, end = [0] * len(text.num_right), 1, len(text.num_right)
        while start < end:
            allotment = self._controller.allot(1)
            depth = min(allotment.allowances[0].depth, end - start - 1, _DEPTH)
            right = min(text.num_right[start], depth)
            if depth:
                self._controller.further({0: _chain(depth)})
                self._controller.select({0: _chain(depth)})
            draft, verify = self._seconds.draft[depth], self._seconds.rest[depth]
            step = SequenceStep(
                request_id="", num_drafted=depth, tree_depth=depth, num_accepted=right, num_emitted=right + 1,
                tokens=range(right + 1), accepted_by={}, num_proposed=depth or None,
            )  # fmt: skip
            asked = [AskedDrafter(index=0, name="", depth=depth, seconds=draft)] if depth else []
            self._controller.learn_step(
                StepRecord(
                    sequences=[step], num_tokens=1 + depth, asked=asked, declined=allotment.declined,
                    seconds=StageSeconds(draft=draft, verify=verify),
                )
            )  # fmt: skip
            lengths[start], start = depth, start + right + 1
        return lengths


def _relative(texts: Sequence[LoggedText], each: Any, best: Any) -> tuple[float, float]:
    """Returns the ratio of two rates, and its jackknife standard error; of each text tokens, passes and seconds."""
    ours, theirs = (torch.tensor([part.seconds for part in parts]) for parts in (each, best))
    ratio, without = theirs.sum() / ours.sum(), (theirs.sum() - theirs) / (ours.sum() - ours)
    error = ((len(texts) - 1) * without.var(correction=0)).sqrt()
    return float(ratio), float(error)


def _replays(
    texts: Sequence[LoggedText], lengths: Callable[[LoggedText], list[int]], seconds: Sequence[float]
) -> list[stopping.Replayed]:
    return [stopping.replay([text], [lengths(text)], seconds) for text in texts]


def _rows(
    texts: Sequence[LoggedText],
    rules: dict[str, Any],
    seconds: Mapping[str, IterationSeconds],
) -> dict[str, dict[str, float]]:
    """Returns for each policy its gain over plain decoding, its rate beside the best fixed length, and tau."""
    whole = seconds["fixed"].total
    told = CostCurve(range(1, _DEPTH + 2), seconds["fixed"].rest)
    fixed = [_replays(texts, lambda text, n=n: [n] * len(text.num_right), whole) for n in range(_DEPTH + 1)]  # type: ignore[misc]
    best = min(range(1, _DEPTH + 1), key=lambda n: sum(part.seconds for part in fixed[n]))
    nodes, timed = [range(1, _DEPTH + 2)], [(n, seconds["fixed"].draft[n]) for n in (1, 4)] * 2
    controllers: dict[str, Controller] = {
        "heuristic": Heuristic(_DEPTH + 1),
        "smartspec": SmartSpec(told, [timed], nodes, _DEPTH + 1),
        "goodput": Goodput(told, nodes_by_depth=nodes, max_nodes=_DEPTH + 1, is_read=False, timed=[timed]),
    }
    found = {"plain": fixed[0], f"fixed, {best} tokens": fixed[best]}
    for name, controller in controllers.items():
        found[name] = _replays(texts, _Played(controller, seconds["fixed"]).lengths, whole)
    for name, rule in rules.items():
        found[name] = _replays(texts, lambda text, rule=rule: stopping.rule_lengths(rule, text), seconds[name].total)  # type: ignore[misc]
    found["oracle"] = _replays(texts, lambda text: text.num_right, whole)
    plain, rows = sum(part.seconds for part in fixed[0]), {}
    for name, parts in found.items():
        ratio, error = _relative(texts, parts, fixed[best])
        tau = sum(part.tokens for part in parts) / sum(part.passes for part in parts)
        rows[name] = {
            "gain": plain / sum(part.seconds for part in parts), "beside_fixed": ratio, "error": error, "tau": tau,
        }  # fmt: skip
    return rows


def main(arguments: list[str]) -> None:
    """Trains, replays, and writes Markdown and JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stopping", description=__doc__)
    parser.add_argument("model", nargs="?", default="models/tinycode")
    parser.add_argument("-s", dest="drafter", default="draft_model", help="as `foretoken tune stop -s`")
    parser.add_argument("--log-model", help="model that writes the log, if not MODEL: the original of a cost twin")
    parser.add_argument("--log-drafter", help="drafter of the log, as -s")
    parser.add_argument("--out", type=Path, required=True, help="files to write, without suffix")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--level", type=float, action="append", help="seconds of a drafted token, a pass being 1; measures nothing"
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    set_num_threads(options.threads)
    model, tokenizer = load_model(options.model, dtype=options.dtype), load_tokenizer(options.model)
    drafter = _options(options.drafter, options.model)
    code, edits, prose = (load_prompts(name) for name in ("heldout", "edit", "prose"))
    if options.level:
        costings = {f"a level costs {level:g}": dict.fromkeys(_CONTROLS, _assumed(level)) for level in options.level}
    else:
        seconds = stopping.iteration_seconds(
            model, tokenizer, code[24:], options=drafter, controls=_CONTROLS, depth=_DEPTH
        )
        costings = {"as measured": seconds, "rules cost nothing": dict.fromkeys(_CONTROLS, seconds["fixed"])}
    writer = options.log_model or options.model
    target = load_model(writer, dtype=options.dtype) if options.log_model else model
    draft = load_model(str(_options(options.log_drafter or options.drafter, writer).model), dtype=options.dtype)
    logs = {
        name: stopping.log_drafts(
            draft, target, tokenizer,
            Workload(prompts=prompts, temperatures=[options.temperature], max_tokens=options.max_tokens), depth=_DEPTH,
        )
        for name, prompts in {"training": [*code[24:88], *edits], "code": code[:24], "prose": prose}.items()
    }  # fmt: skip
    tables, errors = {}, {}
    for costing, by_control in costings.items():
        trained = stopping.train_rules(logs["training"], by_control)
        rules = {"confidence": stopping.tuned_rule(
            "confidence", None, logs["training"][:: stopping.HELD_BACK], by_control["confidence"].total
        )} | {name: each.rule for name, each in trained.items()}  # fmt: skip
        for name in ("code", "prose"):
            tables[f"{name}, {costing}"] = _rows(logs[name], rules, by_control)
            examples = stopping.examples_of(logs[name])
            errors[name] = {
                control: stopping.calibration_error(control, each.rule, examples) for control, each in trained.items()
            }
    machine = describe_machine()
    record = {
        "model": options.model, "drafter": options.drafter, "dtype": options.dtype, "threads": options.threads,
        "temperature": options.temperature, "processor": machine["cpu"], "commit": commit("foretoken", "models"),
        "command": shlex.join(["python", "-m", "benchmarks.stopping", *arguments]),
        "iteration_s": {costing: {name: row.total for name, row in each.items()} for costing, each in costings.items()},
        "calibration_error": errors, "tables": tables,
    }  # fmt: skip
    options.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    report = _markdown(tables)
    options.out.with_suffix(".md").write_text(report, encoding="utf-8")
    print(report, json.dumps(errors))


def _options(text: str, model: str) -> Any:
    return parse_speculative_config(parse_setup(text, target=model).config, target=model).options[0]


def _markdown(tables: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [
        f"| over the best fixed length (over plain, tau) | {' | '.join(tables)} |",
        "|---" * (len(tables) + 1) + "|",
    ]
    names = list(dict.fromkeys(name.split(",")[0] for rows in tables.values() for name in rows))
    for name in names:
        cells = []
        for rows in tables.values():
            full, row = next((full, row) for full, row in rows.items() if full.split(",")[0] == name)
            length = f"{full.partition(', ')[2]}: " if "," in full else ""
            cells.append(
                f"{length}{row['beside_fixed']:.3f} ± {row['error']:.3f} ({row['gain']:.2f}, {row['tau']:.2f})"
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
