"""Plain decoding itself against two slow and obvious programs: `transformers` and a loop without any cache."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from end_to_end.request_mix import CONTEXT_LEN, Request, plain_mix, request_mix
from end_to_end.tiny_llms import target, tokenizer
from tiny_models import EOS_ID, tiny_model

from foretoken import LLM, SamplingParams
from foretoken.sampling.noise import KeyedNoise, Purpose, derive_seed

PROMPTS = ([5], [7, 8, 9, 10, 11], [3, 4] * 6)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3", "gpt_neox", "mistral"])
def test_greedy_is_what_transformers_generates(architecture: str) -> None:
    module = tiny_model(architecture)
    theirs = copy.deepcopy(module)  # ours sets the module's attention to the plug-in
    outputs = LLM(module).generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt])
        want = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, pad_token_id=0
        )
        assert output.outputs[0].token_ids == want[0, len(prompt) :].tolist()


def test_sampling_is_what_a_slow_loop_draws() -> None:
    """Full forward for every token, processors one token at a time, Gumbel noise of the seed and the position."""
    module = copy.deepcopy(target())
    module.set_attn_implementation("eager")
    compared = 0
    for request, output in zip(request_mix(), plain_mix(), strict=True):
        if request.params.stop_strings:
            continue
        for completion in output.outputs:
            assert completion.token_ids == _slow_loop(module, request, completion.index), request.name
            compared += len(completion.token_ids)
    assert compared > 300


def _slow_loop(module: Any, request: Request, index: int) -> list[int]:
    """One completion, written from the definitions in `SamplingParams` alone."""
    params, ids, output = request.params, list(request.prompt), []
    limit = CONTEXT_LEN - len(ids)
    limit = limit if params.max_tokens is None else min(limit, params.max_tokens)
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS_ID,))}
    while len(output) < limit and not (output and output[-1] in stops):
        with torch.inference_mode():
            logits = module(torch.tensor([ids])).logits[0, -1].float()
        logits = _processed(logits, params, request.prompt, output)
        if params.temperature == 0.0:
            token = int(logits.argmax())
        else:
            log_probs = torch.log(_truncated(torch.softmax(logits / params.temperature, 0), params))
            noise = KeyedNoise(torch.tensor([derive_seed(params.seed or 0, index)]))
            gumbel = noise.gumbel(torch.tensor([len(ids)]), Purpose.TARGET, logits.shape[0])[0]
            token = int((log_probs + gumbel).argmax())
        ids.append(token)
        output.append(token)
    return output


def _processed(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Held-back and forbidden tokens, bias and penalties, token by token."""
    logits = logits.clone()
    if len(output) < params.min_tokens:
        logits[[EOS_ID, *params.stop_token_ids]] = float("-inf")
    if params.allowed_token_ids is not None:
        kept = torch.tensor(params.allowed_token_ids)
        logits = torch.full_like(logits, float("-inf")).index_copy(0, kept, logits[kept])
    for word in params.bad_words:
        ids = [tokenizer().convert_tokens_to_ids(word)] if isinstance(word, str) else list(word)
        if (prompt + output)[len(prompt + output) - len(ids) + 1 :] == ids[:-1]:
            logits[ids[-1]] = float("-inf")
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    counts = Counter(output)
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token, count in counts.items():
        logits[token] -= params.presence_penalty + params.frequency_penalty * count
    return logits


def _truncated(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Top-k, then top-p, then min-p, each over what the one before left."""
    ranked = probs.argsort(descending=True, stable=True).tolist()
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    kept, mass, total = [], 0.0, float(probs[ranked].sum())
    for token in ranked:
        if kept and mass >= params.top_p * total:
            break
        kept.append(token)
        mass += float(probs[token])
    kept = [token for token in kept if probs[token] >= params.min_p * probs[kept[0]]]
    truncated = torch.zeros_like(probs)
    truncated[kept] = probs[kept] / probs[kept].sum()
    return truncated
