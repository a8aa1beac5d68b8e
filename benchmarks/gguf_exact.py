"""Shows that GGUF files are read exactly: tensors, perplexity and greedy texts against independent readers.

    python -m benchmarks.gguf_exact types MODEL.gguf TEXT LLAMA_CPP OUT   # makes a file of each type, then as `files`
    python -m benchmarks.gguf_exact files TEXT LLAMA_CPP FILE.gguf …      # tensors and perplexity
    python -m benchmarks.gguf_exact chats FILE.gguf …                     # greedy texts of 20 chats
    python -m benchmarks.gguf_exact inputs TEXT FILE.gguf …               # perplexity by the bits of inputs

LLAMA_CPP is the folder of llama.cpp's programs; without its perplexity program that column is "nan". The `gguf` package
dequantizes each tensor for the comparison, and transformers runs its own reading of the file in float32. Perplexity is
llama.cpp's: windows of 512 tokens, of each the second half counts, BOS first where the file asks for it.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import AutoModelForCausalLM

from foretoken import LLM, SamplingParams
from foretoken.models.quantization.gguf import gguf_tokenizer
from foretoken.models.quantization.gguf_file import read_gguf

_TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "IQ4_NL", "IQ4_XS"),
    *("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M"),
)
_WINDOW, _WINDOWS = 512, 4  # 2,048 tokens, and half of them count
_SCORED = range(_WINDOW // 2 + 1, _WINDOW)
_TOKENS = 64  # of an answer
_QUESTIONS = (
    "What is the capital of Australia?",
    "Explain why the sky is blue in two sentences.",
    "Write a Python function that reverses a list.",
    "List three uses of baking soda.",
    "Translate 'good morning' into French and German.",
    "What is 17 times 23? Show the steps.",
    "Write a short poem about the sea.",
    "What does an operating system do?",
    "Give me a recipe for pancakes.",
    "Why do cats purr?",
    "Write a SQL query that counts the users of each country.",
    "Summarise the plot of Romeo and Juliet.",
    "How do I boil an egg?",
    "Name the planets of the solar system in order.",
    "What is the difference between TCP and UDP?",
    "Write a haiku about autumn.",
    "Explain recursion to a child.",
    "What are the symptoms of a cold?",
    "Write an email that declines a meeting politely.",
    "Is 91 a prime number?",
)


def make_files(model: Path, text: Path, programs: Path, out: Path) -> list[Path]:
    """Writes the model in float32 and in every type with llama.cpp's quantizer; files that are there are kept."""
    out.mkdir(parents=True, exist_ok=True)

    def run(program: str, *arguments: Any, made: Path) -> Path:
        if not made.exists():
            command = [str(programs / program), *map(str, arguments)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return made

    whole, importance = out / "F32.gguf", out / "importance.gguf"
    run("llama-quantize", "--allow-requantize", model, whole, "F32", made=whole)
    run("llama-imatrix", "-m", whole, "-f", text, "-o", importance, "-c", _WINDOW, made=importance)
    files = []
    for name in _TYPES:
        made = out / f"{name}.gguf"
        form = ["--tensor-type", "weight=mxfp4", whole, made, "Q8_0"] if name == "MXFP4" else [whole, made, name]
        form[-1] = "IQ2_M" if name == "IQ2_S" else form[-1]  # the mixes have other names than their types there
        files.append(run("llama-quantize", "--pure", "--imatrix", importance, *form, made=made))
    return files


def tensors_of(path: Path) -> str:
    """Compares all tensors with the `gguf` package's; tells their types, and the largest relative difference."""
    file, worst, counts = read_gguf(path), 0.0, dict[str, int]()
    for tensor in gguf.GGUFReader(path).tensors:
        stored = file.tensors[tensor.name]
        theirs = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type)).view(stored.shape)
        is_matrix = stored.is_quantized and len(stored.shape) == 2
        ours = file.matrix(tensor.name, torch.float32).dequantized() if is_matrix else file.dense(tensor.name).float()
        worst = max(worst, float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)))
        if is_matrix:
            counts[stored.type_name] = counts.get(stored.type_name, 0) + 1
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    return f"{kinds} | {'equal' if worst == 0 else f'{worst:.0e}'}"


def theirs_of(path: Path) -> Any:
    """Returns transformers' own model of a file, in float32."""
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def tokenizer_of(path: Path) -> Any:
    """Returns a file's tokenizer; ends the program if it has none."""
    return gguf_tokenizer(path) or sys.exit(f"{path} has no tokenizer. Pass another file.")


def windows_of(path: Path, text: Path) -> list[list[int]]:
    """Returns token ids of the windows of a text; BOS replaces the first of each if texts begin with BOS."""
    tokenizer = tokenizer_of(path)
    ids, bos = tokenizer.encode(text.read_text(encoding="utf-8")), tokenizer.encode("")[:1]
    starts = range(0, _WINDOW * _WINDOWS, _WINDOW)
    return [[*bos, *ids[start + len(bos) : start + _WINDOW]] for start in starts]


def perplexities(path: Path, text: Path, programs: Path) -> tuple[float, float, float]:
    """Returns foretoken's perplexity in bfloat16, transformers' in float32, and llama.cpp's."""
    windows = windows_of(path, text)
    ours = our_perplexity(path, windows, dtype="bfloat16")
    model, theirs = theirs_of(path), []
    for window in windows:
        with torch.inference_mode():
            logits = model(torch.tensor([window])).logits[0].log_softmax(-1)
        theirs += [float(logits[at - 1, window[at]]) for at in _SCORED]
    if not (programs / "llama-perplexity").exists():
        return ours, perplexity(theirs), math.nan
    command = [programs / "llama-perplexity", "-m", path, "-f", text, "-c", _WINDOW, "--chunks", _WINDOWS]
    command += ["-t", torch.get_num_threads()]
    printed = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    llama = re.search(r"PPL = ([0-9.]+)", printed.stdout + printed.stderr)
    return ours, perplexity(theirs), float(llama[1]) if llama else math.nan


def our_perplexity(path: Path, windows: list[list[int]], **options: Any) -> float:
    """Returns the perplexity of windows; `options` of `LLM`."""
    llm = LLM(str(path), max_num_seqs=1, max_model_len=_WINDOW + 8, **options)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": window} for window in windows], params, use_tqdm=False)
    found = [output.prompt_logprobs or [] for output in outputs]
    rows = [(entries[at] or {})[window[at]] for entries, window in zip(found, windows, strict=True) for at in _SCORED]
    return perplexity([row.logprob for row in rows])


def perplexity(log_probs: list[float]) -> float:
    """Returns the perplexity of tokens by their log-probabilities."""
    return math.exp(-sum(log_probs) / len(log_probs))


def compare_inputs(text: Path, files: list[Path]) -> None:
    """Prints the perplexity of each file with inputs of 24, 16 and 8 bits."""
    print("| file | 24 bits | 16 bits | difference | 8 bits | difference |\n" + "|---" * 6 + "|")
    settings: list[dict[str, Any]] = [{"dtype": "float32"}, {}, {"quantization": "a8"}]
    for path in files:
        windows = windows_of(path, text)
        wide, usual, narrow = (our_perplexity(path, windows, **each) for each in settings)
        cells = [f"{each:.4f} | {each / wide - 1:+.2%}" for each in (usual, narrow)]
        print(f"| {path.stem} | {wide:.4f} | {' | '.join(cells)} |", flush=True)


def compare_files(text: Path, programs: Path, files: list[Path]) -> None:
    """Prints a row for each file."""
    print("| file | matrices | tensors | perplexity | transformers | difference | llama.cpp |\n" + "|---" * 7 + "|")
    for path in files:
        row = tensors_of(path)
        ours, theirs, llama = perplexities(path, text, programs)
        print(
            f"| {path.stem} | {row} | {ours:.3f} | {theirs:.3f} | {ours / theirs - 1:+.2%} | {llama:.3f} |", flush=True
        )


def compare_chats(path: Path) -> None:
    """Prints how many greedy texts, drafted by n-grams in float32, are those of transformers' own model."""
    tokenizer = tokenizer_of(path)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if tokenizer.chat_template
        else tokenizer.encode(question)
        for question in _QUESTIONS
    ]
    llm = LLM(
        str(path), dtype="float32", max_num_seqs=4, max_model_len=512,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    )  # fmt: skip
    params = SamplingParams(max_tokens=_TOKENS, temperature=0.0)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    ends = list(llm.target.model.eos_ids)
    del llm
    model, equal = theirs_of(path), 0
    for question, prompt, output in zip(_QUESTIONS, prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            whole = model.generate(ids, max_new_tokens=_TOKENS, do_sample=False, eos_token_id=ends)
        found, expected = list(output.outputs[0].token_ids), whole[0, len(prompt) :].tolist()
        if output.outputs[0].finish_reason == "stop":  # by an end token, which transformers keeps
            expected = expected[: len(found)] if len(expected) in (len(found), len(found) + 1) else expected
        equal += found == expected
        if found != expected:
            at = next((at for at, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), -1)
            print(f"{path.name}: {question!r} differs at token {at} of {len(found)}", flush=True)
    print(f"{path.name}: {equal} of {len(prompts)} greedy texts equal", flush=True)


def main() -> None:
    """Runs what the first argument names."""
    match sys.argv[1:]:
        case ["types", *paths] if len(paths) == 4:
            model, text, programs, out = map(Path, paths)
            compare_files(text, programs, make_files(model, text, programs, out))
        case ["files", text, programs, *files] if files:
            compare_files(Path(text), Path(programs), list(map(Path, files)))
        case ["chats", *files] if files:
            for path in map(Path, files):
                compare_chats(path)
        case ["inputs", text, *files] if files:
            compare_inputs(Path(text), list(map(Path, files)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
