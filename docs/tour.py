"""A first hour with foretoken. Each function is a step of docs/tour.md; `main` runs the steps in order.

Run in the repository: python docs/tour.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import foretoken
from foretoken import LLM, SamplingParams, TrainingResult

TARGET = "models/tinycode"
PROMPT = "def read_config(path):\n"
GREEDY = SamplingParams(temperature=0, max_tokens=64)
TRAINING_STEPS = 120  # about a minute on one core


def load() -> str:
    """Loads the target and writes 64 tokens without drafts."""
    llm = LLM(TARGET)
    output = llm.generate(PROMPT, GREEDY)[0]
    print(PROMPT + output.outputs[0].text)
    print(f"--- {output.metrics.num_emitted} tokens, 1 target pass for the prompt, {output.metrics.steps} for the rest")
    return output.outputs[0].text


def draft(plain: str) -> None:
    """Writes the same text with a draft model, 4 tokens a draft."""
    config = {"method": "draft_model", "model": "models/tinycode-draft", "num_speculative_tokens": 4}
    output = LLM(TARGET, speculative_config=config).generate(PROMPT, GREEDY)[0]
    metrics = output.metrics
    print(f"target passes after the prompt: {metrics.steps}")
    print(f"drafted tokens accepted: {metrics.num_accepted} of {metrics.num_drafted}")
    print("accepted at depth 1, 2, 3, 4:", *(f"{rate:.0%}" for rate in metrics.acceptance_by_depth))
    print(f"tau, tokens a target pass: {metrics.mean_acceptance_length:.2f}")
    print(f"same text: {output.outputs[0].text == plain}")


def path_to(node: int, parents: list[int]) -> list[int]:
    """Returns the nodes from the root to a node; sorted by it, a tree reads from top to bottom."""
    return [] if node < 0 else [*path_to(parents[node], parents), node]


def look_at_a_tree() -> None:
    """Prints the first token tree of a Hydra head: token, probability in the target, outcome."""
    config = {"method": "hydra", "model": "models/tinycode-hydra", "num_speculative_tokens": 4}
    config |= {"tree": "dynamic", "max_nodes": 12}
    records = []
    llm = LLM(TARGET, speculative_config=config, trace=True, on_step=records.append)
    llm.generate(PROMPT, GREEDY)
    trace = records[1].sequences[0].trace  # records[0] is the pass over the prompt
    order = sorted(range(len(trace.parents)), key=lambda node: path_to(node, trace.parents))
    for node in order:
        token = "    " * trace.depths[node] + repr(llm.tokenizer.decode([trace.tokens[node]]))
        probability = "" if node == 0 else f"{trace.token_probs[node]:.3f}"
        print(f"{token:28} {probability:6} {trace.outcomes()[node]}")
    print(f"the target's own next token: {llm.tokenizer.decode([trace.next_token])!r}")


def verify() -> None:
    """Compares texts with and without drafts, greedy and sampled with a seed."""
    prompts = [PROMPT, "class Queue:\n", "x = [0, 0, 0,"]
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=64)
        plain = [output.outputs[0].text for output in LLM(TARGET).generate(prompts, params)]
        for method in ("ngram", "draft_model", "hydra"):
            drafter = f"{method}:num_speculative_tokens=4"
            outputs = LLM(TARGET, speculative_config=drafter).generate(prompts, params)
            same = [output.outputs[0].text for output in outputs] == plain
            accepted = sum(output.metrics.num_accepted for output in outputs)
            print(f"temperature {temperature:.1f}  {method:12} same texts: {same}, {accepted} drafted tokens accepted")


def train_a_head(place: Path) -> TrainingResult:
    """Trains a Hydra head on the source code of foretoken."""
    data = ["data", TARGET, "--text", "foretoken/**/*.py", "--held-out-fraction", "0.05", "--out", f"{place}/data"]
    made = subprocess.run([sys.executable, "-m", "foretoken", *data], capture_output=True, text=True, check=True)
    print(made.stdout.replace(f"{place}/", "").strip())
    result = foretoken.train(
        "hydra", TARGET, data=place / "data", out=place / "head", sizes={"num_heads": 3}, steps=TRAINING_STEPS,
        lr=2e-3, warmup_steps=10, batch_size=4, length=128, eval_every=10, num_prompts=2,
    )  # fmt: skip
    print(f"{result.facts['parameters']} parameters, trained on {result.facts['tokens']} tokens")
    print(f"loss {result.losses[0]:.1f} at the first step, {result.losses[-1]:.1f} at the last")
    return result


def look_at_acceptance(result: TrainingResult) -> None:
    """Prints the acceptance on held-out text while the head learned, and draws it."""
    for step, rates in result.acceptance.items():
        by_depth = " ".join(f"{rate:4.0%}" for rate in rates)
        print(f"step {step:3}  tau {result.tau[step]:.2f}  accepted to depth 1, 2, 3: {by_depth}")
    print(f"on prompts, in token trees: tau {result.facts['dynamic_tau_at_temperature_0']:.2f}")
    result.plot(result.directory.with_name("tour.svg"))


@contextmanager
def serve(head: Path) -> Iterator[str]:
    """Starts a server with the new head as drafter and gives its address; stops it at the end."""
    options = ["-s", f"hydra:model={head}:num_speculative_tokens=3", "--port", "0"]  # 0: any free port
    command = [sys.executable, "-m", "foretoken", "serve", TARGET, *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stderr:
                if "http://" in line:  # not "timing passes ...", as on the first start
                    break
            print(line.strip())  # "serving ... on http://127.0.0.1:PORT", or why not
            yield line[line.index("http://") :].strip()
        finally:
            process.terminate()


def ask(address: str, plain: str) -> None:
    """Sends a request in OpenAI's format and compares the answer with the text of the first step."""
    request = {"prompt": PROMPT, "max_tokens": 64, "temperature": 0, "spec_decode_metrics": "summary"}
    call = urllib.request.Request(f"{address}/v1/completions", json.dumps(request).encode())
    call.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(call, timeout=60) as response:
        answer = json.load(response)
    print(answer["choices"][0]["text"])
    print(f"--- same text: {answer['choices'][0]['text'] == plain}")
    metrics = answer["metrics"]["speculative_decoding"]
    print(f"--- tau {metrics['mean_acceptance_length']:.2f} in {metrics['num_spec_steps']} target passes")


def main() -> None:
    """Runs the steps in order."""
    plain = load()
    draft(plain)
    look_at_a_tree()
    verify()
    result = train_a_head(Path(tempfile.mkdtemp(prefix="tour-")))
    look_at_acceptance(result)
    with serve(result.directory) as address:
        ask(address, plain)


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    main()
