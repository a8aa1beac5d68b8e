"""Compares every output of a drafter with plain decoding; a difference is a near-tie or a bug."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from foretoken.bench.workload import TokenProgress, Workload, no_progress
from foretoken.core.token_tree import common_prefix_len
from foretoken.entrypoints.llm import LLM
from foretoken.models.generic import generate_plain, run_plain
from foretoken.sampling.noise import KeyedNoise, Purpose, derive_seed

if TYPE_CHECKING:
    from foretoken.core.results import RequestOutput
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.entrypoints.config import Setup
    from foretoken.models.loaded import LoadedModel

Verdict = Literal["identical", "near-tie", "bug"]
# A near-tie: the two tokens' scores (logits, with temperature and noise if sampled) are this close, relative to the
# largest logit. Rounding in a pass of another width reaches so far.
NEAR_TIE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One prompt decoded by one setup, compared with plain decoding."""

    setup: str
    runner: str
    runner_choice: str
    temperature: float  # 0 for greedy
    batch_size: int
    prompt: int
    num_tokens: int
    mean_acceptance_length: float  # tau of the run, which shows that drafts were accepted
    divergence: int | None  # index of the first output token that differs, or None
    gap: float | None  # difference of the two tokens' scores there over the largest logit
    verdict: Verdict  # "identical", "near-tie" (gap within rounding), or "bug"

    @property
    def is_proof(self) -> bool:
        """Whether the check supports losslessness."""
        return self.verdict in ("identical", "near-tie")


def verify_setups(
    model: LoadedModel,
    tokenizer: Any,
    setups: Sequence[Setup],
    workload: Workload,
    *,
    batch_sizes: Sequence[int],
    with_transformers: bool = False,
    runner: str = "auto",
    on_progress: Callable[[int, int], None] = no_progress,
) -> Iterator[list[Comparison]]:
    """Decodes every prompt plainly, one at a time, then by every setup at every batch size, and compares.

    Yields the comparisons of one setup, temperature and batch size after another. `with_transformers` also compares
    with `generate` of transformers. `on_progress` counts output tokens.
    """
    progress = TokenProgress(
        workload, len(workload.temperatures) * (1 + len(setups) * len(batch_sizes)), report=on_progress
    )
    # Over the whole vocabulary, as `generate` of transformers decodes.
    engine = partial(LLM, model, tokenizer=tokenizer, runner=runner, allow_unknown_ids=True, on_step=progress.add)
    plain = engine(max_num_seqs=1, enable_prefix_caching=False)
    prompts = list(workload.prompts)
    for temperature in workload.temperatures:
        params = workload.params(temperature)
        expected = plain.generate(prompts, params)
        progress.end_run()
        if with_transformers and temperature == 0:
            found = []
            for want in expected:
                ids = generate_plain(model.module, want.prompt_token_ids, workload.max_tokens)
                if want.outputs[0].finish_reason == "stop":  # at the end-of-sequence token, which `ids` go on after
                    ids = ids[: len(want.outputs[0].token_ids)]
                found.append((ids, 1.0))
            yield _judged(model, "transformers generate", plain, params, expected, found)
        for setup in setups:
            config = setup.with_references(expected)
            for batch_size in batch_sizes:
                llm = engine(speculative_config=config, max_num_seqs=batch_size)
                outputs = llm.generate(prompts, params)
                found = [(got.outputs[0].token_ids, got.metrics.mean_acceptance_length) for got in outputs]
                progress.end_run()
                yield _judged(model, setup.name, llm, params, expected, found, batch_size)


def _judged(
    model: LoadedModel,
    setup: str,
    llm: LLM,
    params: Sequence[SamplingParams],
    expected: Sequence[RequestOutput],
    found: Sequence[tuple[list[int], float]],
    batch_size: int = 1,
) -> list[Comparison]:
    """Compares every prompt's output with the expected one; found: token ids and acceptance lengths of one setup."""
    comparisons = []
    for index, (want, (ids, tau)) in enumerate(zip(expected, found, strict=True)):
        judge = Judge(model, setup, llm.target.name, llm.target.choice, batch_size, params[index])
        comparisons.append(judge.compare(index, want.prompt_token_ids, want.outputs[0].token_ids, ids, tau))
    return comparisons


@dataclass(frozen=True, slots=True)
class Judge:
    """Compares the outputs of one setup with plain decoding's; see `Comparison`."""

    model: LoadedModel
    setup: str
    runner: str
    runner_choice: str
    batch_size: int
    params: SamplingParams

    def compare(
        self, prompt: int, prompt_ids: list[int], reference: list[int], ids: list[int], tau: float
    ) -> Comparison:
        """Returns the verdict on one prompt; `tau` is the acceptance length of the run that wrote `ids`."""
        at: int | None = None
        gap: float | None = None
        verdict: Verdict = "identical"
        if ids != reference:
            at = common_prefix_len(ids, reference)
            if at < min(len(ids), len(reference)):  # rounding cannot explain that one text ends earlier
                gap = self._gap(prompt_ids, reference[:at], (ids[at], reference[at]))
            is_tie = gap is not None and gap <= NEAR_TIE.get(self.model.dtype, NEAR_TIE[torch.float32])
            verdict = "near-tie" if is_tie else "bug"
        return Comparison(
            setup=self.setup,
            runner=self.runner,
            runner_choice=self.runner_choice,
            temperature=self.params.temperature,
            batch_size=self.batch_size,
            prompt=prompt,
            num_tokens=len(ids),
            mean_acceptance_length=tau,
            divergence=at,
            gap=gap,
            verdict=verdict,
        )

    def _gap(self, prompt: list[int], output: list[int], tokens: tuple[int, int]) -> float:
        """Returns the difference of two tokens' scores over the largest logit, by a plain forward pass."""
        logits = run_plain(self.model.module, torch.tensor([prompt + output])).logits[0, -1].float()
        scores = logits
        if not self.params.is_greedy:
            noise = KeyedNoise(torch.tensor([derive_seed(self.params.seed or 0, 0)], device=logits.device))
            position = torch.tensor([len(prompt) + len(output)], device=logits.device)
            scores = logits / self.params.temperature + noise.gumbel(position, Purpose.TARGET, logits.shape[0])[0]
        return float((scores[tokens[0]] - scores[tokens[1]]).abs() / logits.abs().max())
