"""Proof that speculation changes nothing: every output against plain decoding, every difference explained or a bug."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from foretoken.bench.workload import no_progress
from foretoken.engine.llm import LLM
from foretoken.sampling.noise import KeyedNoise, Purpose, derive_seed
from foretoken.target.taps import run_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.bench.setups import Setup
    from foretoken.bench.workload import Workload
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.target.loading import LoadedModel

Verdict = Literal["identical", "near-tie", "bug"]
# A difference counts as a near-tie when the two tokens' scores (logits; with temperature and noise where sampled) are
# this close, relative to the largest logit: rounding of a pass of another width reaches so far.
# are this close, relative to the largest logit: rounding of a pass of another width reaches that far.
NEAR_TIE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One prompt decoded by one setup, compared with plain decoding.

    Attributes:
        setup: Name of the setup.
        temperature: 0 for greedy.
        batch_size: Sequences decoded at once.
        prompt: Index of the prompt.
        num_tokens: Output tokens compared.
        mean_acceptance_length: tau of the run, to show that drafts were really accepted.
        divergence: Index of the first output token that differs, or None.
        gap: Difference of the two tokens' scores there over the largest logit, recomputed by an ordinary forward.
        verdict: "identical", "near-tie" (gap within rounding), or "bug".
    """

    setup: str
    temperature: float
    batch_size: int
    prompt: int
    num_tokens: int
    mean_acceptance_length: float
    divergence: int | None
    gap: float | None
    verdict: Verdict

    @property
    def is_proof(self) -> bool:
        """Whether the check speaks for losslessness."""
        return self.verdict in ("identical", "near-tie")


def verify_setups(
    model: LoadedModel,
    tokenizer: Any,
    setups: Sequence[Setup],
    workload: Workload,
    *,
    batch_sizes: Sequence[int],
    on_progress: Callable[[int, int], None] = no_progress,
) -> list[Check]:
    """Decodes every prompt plainly, one at a time, then by every setup at every batch size, and compares.

    Args:
        model: The target, loaded once.
        tokenizer: Its tokenizer.
        setups: What to check.
        workload: What to decode.
        batch_sizes: Sequences decoded at once.
        on_progress: Called with runs done and runs in all.
    """
    plain = LLM(model, tokenizer=tokenizer, max_num_seqs=1)
    total = len(workload.temperatures) * (1 + len(setups) * len(batch_sizes))
    done = 0
    checks = []
    prompts = list(workload.prompts)
    for temperature in workload.temperatures:
        params = workload.params(temperature)
        expected = plain.generate(prompts, params)
        done += 1
        on_progress(done, total)
        for setup in setups:
            config = _with_references(setup, [[*e.prompt_token_ids, *e.outputs[0].token_ids] for e in expected])
            for batch_size in batch_sizes:
                llm = LLM(model, speculative_config=config, tokenizer=tokenizer, max_num_seqs=batch_size)
                for index, (got, want) in enumerate(zip(llm.generate(prompts, params), expected, strict=True)):
                    ids, reference = got.outputs[0].token_ids, want.outputs[0].token_ids
                    divergence, gap, verdict = _judge(model, want.prompt_token_ids, ids, reference, params[index])
                    checks.append(
                        Check(
                            setup=setup.name,
                            temperature=temperature,
                            batch_size=batch_size,
                            prompt=index,
                            num_tokens=len(ids),
                            mean_acceptance_length=got.metrics.mean_acceptance_length,
                            divergence=divergence,
                            gap=gap,
                            verdict=verdict,
                        )
                    )
                done += 1
                on_progress(done, total)
    return checks


def _with_references(setup: Setup, references: list[list[int]]) -> dict[str, Any] | None:
    """The setup's configuration; the oracle is told what plain decoding wrote."""
    if setup.config is None:
        return None
    config = dict(setup.config)
    if config.get("method") == "oracle":
        config.setdefault("references", references)
    return config


def _judge(
    model: LoadedModel, prompt: list[int], ids: list[int], reference: list[int], params: SamplingParams
) -> tuple[int | None, float | None, Verdict]:
    """First divergence, relative gap of the two scores there, and the verdict."""
    if ids == reference:
        return None, None, "identical"
    common = min(len(ids), len(reference))
    at = next((i for i in range(common) if ids[i] != reference[i]), common)
    if at == common:
        return at, None, "bug"  # one text is longer than the other: no rounding explains that
    logits = run_plain(model.module, torch.tensor([prompt + reference[:at]])).logits[0, -1].float()
    scale = logits.abs().max()
    if not params.is_greedy:
        noise = KeyedNoise(torch.tensor([derive_seed(params.seed or 0, 0)]))
        position = torch.tensor([len(prompt) + at])
        logits = logits / params.temperature + noise.gumbel(position, Purpose.TARGET, logits.shape[0])[0].to(
            logits.device
        )
    gap = float((logits[reference[at]] - logits[ids[at]]).abs() / scale)
    return at, gap, "near-tie" if gap <= NEAR_TIE.get(model.dtype, 1e-4) else "bug"
