"""Logits of GGUF files at each position of a text, beside llama.cpp and transformers.

    python -m benchmarks.gguf_logits MODEL.gguf … --rival PYTHON [--original DIRECTORY] [--tokens 64]

PYTHON is the interpreter of an environment with `llama-cpp-python`, DIRECTORY the model that the files were made of.
All compute in float32, llama.cpp with a KV cache in float32 and without flash attention. A row has the greatest
difference of a logit for each two of them, in units of the greatest logit, and the positions whose best token is the
same. Models with random weights, converted by llama.cpp's own script, check that all its changes are undone.
"""

import argparse
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.machine import describe_machine
from benchmarks.pairs.contestants import Contestant
from foretoken.core.passes import Pass
from foretoken.models.loading import load_model
from foretoken.runner.runner import Runner


def _ours(path: str, ids: list[int]) -> Tensor:
    runner = Runner(load_model(path, dtype="float32"), num_slots=1, context_len=len(ids) + 1, max_nodes=len(ids))
    print(f"\n{path}, runner={runner.name}")
    found = runner.run(Pass.of_chains([ids], slots=range(1), prefix_lens=[0]).with_all_logits()).logits
    assert found is not None, "all logits were asked for"
    return found.float()


def _theirs(path: str, python: str, ids: list[int]) -> Tensor:
    rival = Contestant("llama.cpp", "llama.cpp", python, "llama", target=path, draft=None, is_exact=True)
    with TemporaryDirectory() as folder:
        rival.answer(ids=ids, file=f"{folder}/logits.npy")
        rival.end()
        return torch.from_numpy(np.load(f"{folder}/logits.npy"))


def main() -> None:
    """Prints a table for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rival", required=True, help="an interpreter")
    parser.add_argument("--original", type=Path, help="a directory in Hugging Face layout")
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    print(describe_machine())
    for path in options.models:
        torch.manual_seed(0)
        vocab_size = load_model(path).vocab_size
        ids = torch.randint(vocab_size, (options.tokens,)).tolist()
        found = {"foretoken": _ours(path, ids), "llama.cpp": _theirs(path, options.rival, ids)}
        if options.original is not None:
            module = AutoModelForCausalLM.from_pretrained(options.original, dtype=torch.float32).eval()
            with torch.no_grad():
                found["transformers"] = module(torch.tensor([ids])).logits[0]
        print("| logits of | difference | same best token |\n|---|---|---|")
        for (one, ours), (other, theirs) in combinations(found.items(), 2):
            difference = float((ours - theirs).abs().max() / theirs.abs().max())
            same = int((ours.argmax(1) == theirs.argmax(1)).sum())
            print(f"| {one}, {other} | {difference:.1e} | {same} of {len(ids)} |", flush=True)


if __name__ == "__main__":
    main()
