"""Engines of several setups over one target, which decode and measure batches of a workload."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from foretoken.bench.measurement import Measurement
from foretoken.core.results import GenerationMetrics
from foretoken.entrypoints.config import PLAIN, Setup
from foretoken.entrypoints.llm import LLM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.bench.workload import Workload
    from foretoken.core.records import StepRecord
    from foretoken.core.results import RequestOutput
    from foretoken.models.loading import LoadedModel

_WARM_UP_TOKENS = 8


class SetupEngines:
    """One engine a setup, over weights that are loaded once; plain decoding is always included, as the first.

    Attributes:
        workload: The source of batches.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Any,
        setups: Sequence[Setup],
        workload: Workload,
        *,
        batch_size: int = 1,
        runner: str = "auto",
    ) -> None:
        """Makes the engines.

        Args:
            model: The target.
            tokenizer: The target's tokenizer.
            setups: The drafters to compare.
            workload: Prompts and sampling parameters; sampled requests have the same seeds in every setup.
            batch_size: Sequences decoded at once.
            runner: Runner of the target and of draft models, see `LLM`.
        """
        self.workload = workload
        self._engines: dict[str, LLM] = {}
        self._on_step: Callable[[StepRecord], None] = _ignore  # one engine runs at a time
        self._create = partial(
            LLM, model, tokenizer=tokenizer, max_num_seqs=batch_size, runner=runner, on_step=self._note_step,
            enable_prefix_caching=False,  # a repeated prompt must cost as much as a new one
        )  # fmt: skip
        for setup in [Setup(PLAIN, None), *(setup for setup in setups if setup.config is not None)]:
            self.add(setup)

    @property
    def names(self) -> list[str]:
        """The names of the setups, in order."""
        return list(self._engines)

    def add(self, setup: Setup) -> None:
        """Makes the engine of one more setup; replaces an engine of the same name.

        Raises:
            ForetokenError: When the drafter does not fit the target.
        """
        config = setup.with_references(self._plain_texts() if setup.needs_references else ())
        self._engines[setup.name] = self._create(speculative_config=config)

    def remove(self, name: str) -> None:
        """Frees the engine of a setup, with its memory."""
        del self._engines[name]

    @property
    def is_lossy(self) -> bool:
        """Whether the text of any setup may differ from plain decoding's."""
        return any(engine.is_lossy for engine in self._engines.values())

    def empty(self, name: str, temperature: float) -> Measurement:
        """Returns an empty measurement of a setup."""
        target = self._engines[name].target
        return Measurement(name, temperature, target.name, target.choice)

    def warm_up(self, temperature: float) -> None:
        """Decodes a few tokens with every setup, untimed."""
        params = replace(
            self.workload.params(temperature)[0], max_tokens=min(_WARM_UP_TOKENS, self.workload.max_tokens)
        )
        for engine in self._engines.values():
            engine.generate(self.workload.prompts[0], params)

    def measure(self, name: str, temperature: float, batch: Sequence[int]) -> Measurement:
        """Decodes one batch with one setup and returns the round.

        Args:
            name: Name of the setup.
            temperature: Temperature of all requests.
            batch: Indices into the workload's prompts.
        """
        row, params = self.empty(name, temperature), self.workload.params(temperature)
        self._on_step = row.add_step
        begin = time.perf_counter()
        results = self._engines[name].generate([self.workload.prompts[i] for i in batch], [params[i] for i in batch])
        seconds = time.perf_counter() - begin
        self._on_step = _ignore
        row.metrics = GenerationMetrics.total(result.metrics for result in results)
        row.seconds.append(seconds - row.metrics.prefill_seconds)
        decoded = row.metrics.num_emitted - row.metrics.num_prefill_emitted
        row.tokens.append(decoded or row.metrics.num_emitted)  # with one token a prompt, prefill's tokens count
        row.taus.append(row.tau)
        row.texts.extend(list(result.outputs[0].token_ids) for result in results)
        return row

    def _note_step(self, record: StepRecord) -> None:
        self._on_step(record)

    def _plain_texts(self) -> list[RequestOutput]:
        plain, workload = self._engines[PLAIN], self.workload
        return [
            output
            for temperature in workload.temperatures
            for output in plain.generate(list(workload.prompts), workload.params(temperature))
        ]


def _ignore(record: StepRecord) -> None:
    del record
