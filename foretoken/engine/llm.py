"""The Python surface: `LLM(model, speculative_config=...).generate(prompts, params)`, in vLLM's shape."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from foretoken.acceptance.select import AcceptancePolicy
from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.results import GenerationMetrics, RequestOutput
from foretoken.core.sampling_params import SamplingParams
from foretoken.drafters.base import Drafter, TargetFacts, nodes_by_depth
from foretoken.drafters.registry import create_drafter
from foretoken.engine.budget import DepthBudget
from foretoken.engine.config import parse_speculative_config
from foretoken.engine.costs import CostCurve, pass_costs
from foretoken.engine.loop import Engine
from foretoken.engine.sequence import Sequence
from foretoken.sampling.batch import SamplingRequest
from foretoken.sampling.noise import derive_seed
from foretoken.target.loading import LoadedModel, load_model, load_tokenizer, wrap_model
from foretoken.target.runner import Runner

if TYPE_CHECKING:
    import torch

    from foretoken.core.records import StepRecord

Prompt = str | Seq[int] | Mapping[str, Any]
_SHORTEST_CONTEXT = 8  # tokens that the proof at load needs


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """New text of one completion.

    Attributes:
        request_id: Position of the prompt in the call.
        index: Which of its n completions.
        text: Text that became certain since the last chunk.
        token_ids: Tokens emitted since the last chunk.
        finish_reason: Set in the last chunk.
    """

    request_id: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


class LLM:
    """A target, a drafter and the engine that runs them.

    Attributes:
        target: The runner.
        tokenizer: The target's tokenizer, or None.
    """

    def __init__(  # noqa: PLR0913 - vLLM's surface
        self,
        model: str | LoadedModel | torch.nn.Module,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        drafter: Callable[[TargetFacts], Drafter] | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        seed: int | None = None,
        tokenizer: Any = None,
        runner: str = "auto",
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        """Loads models and allocates the cache.

        Args:
            model: Directory or hub id of the target, a model loaded before, or a transformers causal LM in memory.
            speculative_config: `{"method": NAME, ...}` with vLLM's keys and ours; None for plain decoding.
            drafter: Makes a drafter of your own, instead of `speculative_config`.
            dtype: "auto" (float32 on CPU), "float32", "bfloat16", "float16" or "float64".
            device: "auto" or a torch device.
            max_num_seqs: Sequences decoded at once.
            max_model_len: Most tokens of a sequence; the model's limit when None.
            seed: Makes requests without a seed of their own reproducible.
            tokenizer: For a model in memory.
            runner: "auto", "generic" (the transformers model itself) or "lean" (a forward of our own, for the
                architectures it knows; "lean-native" or "lean-stock" choose its kernels).
            on_step: Called with every iteration's record.

        Raises:
            ConfigError: When the configuration does not fit.
            ModelError: When a model cannot be loaded or run.
        """
        if speculative_config is not None and drafter is not None:
            raise ConfigError("speculative_config and drafter exclude each other. Pass one of them.")
        if max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs is {max_num_seqs}. Expected at least 1.")
        if max_model_len is not None and max_model_len < _SHORTEST_CONTEXT:
            raise ConfigError(f"max_model_len is {max_model_len}. Expected at least {_SHORTEST_CONTEXT}.")
        loaded = _loaded(model, dtype, device)
        self.tokenizer = load_tokenizer(loaded.name) if tokenizer is None and isinstance(model, str) else tokenizer

        @cache
        def costs() -> CostCurve:
            return pass_costs(loaded, runner)

        facts = TargetFacts(
            name=loaded.name,
            vocab_size=loaded.vocab_size,
            context_len=min(max_model_len or loaded.context_len, loaded.context_len),
            num_slots=max_num_seqs,
            device=loaded.device,
            dtype=loaded.dtype,
            runner=runner,
            tree_nodes=lambda: costs().tree_nodes(),
            pass_seconds=lambda tokens: costs()(tokens),  # noqa: PLW0108 - not measured unless asked for
            tokenizer=self.tokenizer,
            model=loaded,
        )
        policy, adapts = AcceptancePolicy(), False
        made = drafter(facts) if drafter is not None else None
        if speculative_config is not None:
            config = parse_speculative_config(speculative_config, target=loaded.name)
            made, policy, adapts = create_drafter(config.options, facts), config.policy, config.options.adapts_depth
        self.target = Runner(
            loaded,
            num_slots=max_num_seqs,
            context_len=facts.context_len,
            max_nodes=made.max_nodes if made is not None else 1,
            taps=made.taps if made is not None else (),
            runner=runner,
        )
        if max_model_len is not None and self.target.context_len < min(max_model_len, loaded.context_len):
            raise ConfigError(
                f"max_model_len {max_model_len} needs more memory than there is. Expected at most "
                f"{self.target.context_len} with max_num_seqs {max_num_seqs}. Lower one of them."
            )
        budget = DepthBudget(costs(), nodes_by_depth(made)) if made is not None and adapts else None
        self._engine = Engine(
            self.target, made, policy=policy, max_num_seqs=max_num_seqs, budget=budget, on_step=on_step
        )
        self._is_seeded = seed is not None
        self._seeds = random.Random(seed)

    @property
    def is_lossy(self) -> bool:
        """Whether its acceptance rule may change what the target would have written."""
        return self._engine.policy.is_lossy

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
            prompts: A string, a list of token ids, a mapping with `prompt` or `prompt_token_ids`, or several of these.
            params: One for all prompts, or one each.

        Returns:
            One result a prompt, in order.

        Raises:
            RequestError: When a prompt cannot be served; nothing is generated then.
        """
        items = _as_list(prompts)
        requests = self._requests(items, params)
        for _ in self._run([sequence for sequences in requests for sequence in sequences]):
            pass
        return [self._result(i, *each) for i, each in enumerate(zip(items, requests, strict=True))]

    def stream(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> Iterator[StreamChunk]:
        """Completes prompts, giving text as it becomes certain. Takes and raises what `generate` does.

        Closing the iterator ends its requests. Other calls may be made while it is open; iterations serve all of them.
        """
        requests = self._requests(_as_list(prompts), params)
        return self._chunks([sequence for sequences in requests for sequence in sequences])

    def _chunks(self, sequences: list[Sequence]) -> Iterator[StreamChunk]:
        """What every iteration brought to each of some sequences."""
        given = {id(sequence): 0 for sequence in sequences}
        unfinished = sequences
        with closing(self._run(sequences)) as iterations:
            for _ in iterations:
                changed = [s for s in unfinished if s.finish_reason is not None or len(s.output_ids) > given[id(s)]]
                unfinished = [s for s in unfinished if s.finish_reason is None]
                for sequence in changed:
                    tokens = sequence.output_ids[given[id(sequence)] :]
                    given[id(sequence)] += len(tokens)
                    yield StreamChunk(
                        request_id=sequence.request_id,
                        index=sequence.index,
                        text=sequence.take_new_text(),
                        token_ids=tokens,
                        finish_reason=sequence.finish_reason,
                    )

    def _run(self, sequences: list[Sequence]) -> Generator[None]:
        """Runs sequences to their end, pausing after every iteration, and once more for what other calls brought."""
        for sequence in sequences:
            self._engine.add(sequence)
        waiting_for = sequences[::-1]
        try:
            while waiting_for:
                if waiting_for[-1].finish_reason is not None:
                    waiting_for.pop()
                    continue
                self._engine.step()
                yield
            yield
        except Exception:
            self._engine.abort()  # an iteration that broke off may have left any sequence half committed
            raise
        finally:
            self._engine.abort(sequences)  # frees the slots when the caller stops early

    def _requests(
        self, items: list[Prompt], params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[list[Sequence]]:
        """Checks everything before anything is run: n sequences for each prompt."""
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(items)
        else:
            each = list(params)
        if len(each) != len(items):
            raise RequestError(f"{len(items)} prompts came with {len(each)} sampling parameters. Expected as many.")
        return [self._sequences(i, item, p) for i, (item, p) in enumerate(zip(items, each, strict=True))]

    def _sequences(self, request_id: int, prompt: Prompt, params: SamplingParams) -> list[Sequence]:
        """The n sequences of one prompt."""
        ids = self._token_ids(prompt)
        limit = self.target.context_len
        if len(ids) >= limit:
            raise RequestError(
                f"prompt {request_id} has {len(ids)} tokens. Expected at most {limit - 1}, one less than the context "
                "length. Shorten it."
            )
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop holds text but the model has no tokenizer. Use stop_token_ids.")
        for token in [*params.logit_bias, *params.stop_token_ids]:
            self._check_id(token, "logit_bias or stop_token_ids")
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        # The configuration of a model that was cut down may name tokens it no longer has.
        eos_ids = [token for token in self.target.model.eos_ids if 0 <= token < self.target.vocab_size]
        return [
            Sequence(
                request_id=request_id,
                index=index,
                prompt=ids,
                sampling=SamplingRequest(
                    params=params,
                    seed=derive_seed(seed, index),
                    terminators=[*eos_ids, *params.stop_token_ids],
                    bad_words=self._bad_words(params),
                ),
                is_seeded=params.seed is not None or self._is_seeded,
                eos_ids=eos_ids,
                max_len=limit if params.max_tokens is None else min(limit, len(ids) + params.max_tokens),
                tokenizer=self.tokenizer,
            )
            for index in range(params.n)
        ]

    def _token_ids(self, prompt: Prompt) -> list[int]:
        """A prompt as checked token ids."""
        if isinstance(prompt, Mapping):
            if not {"prompt", "prompt_token_ids"} & set(prompt):
                raise RequestError(f"the prompt has the keys {list(prompt)}. Expected 'prompt' or 'prompt_token_ids'.")
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the prompt is text but the model has no tokenizer. Pass token ids.")
            ids = list(self.tokenizer(prompt)["input_ids"])
        elif isinstance(prompt, Seq):
            ids = list(prompt)
        else:
            raise RequestError(f"a prompt is {type(prompt).__name__}. Expected text, a list of token ids or a mapping.")
        if not ids:
            raise RequestError("the prompt is empty. Expected at least one token.")
        for token in ids:
            self._check_id(token, "the prompt")
        return ids

    def _check_id(self, token: Any, where: str) -> None:
        """Raises `RequestError` unless a token id is in the vocabulary."""
        if not isinstance(token, int) or not 0 <= token < self.target.vocab_size:
            raise RequestError(
                f"{where} holds token id {token!r}. Expected integers in 0..{self.target.vocab_size - 1}."
            )

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Forbidden sequences as token ids; a word given as text is forbidden with and without a space before it."""
        words = []
        for word in params.bad_words:
            if not isinstance(word, str):
                words.append(list(word))
            elif self.tokenizer is None:
                raise RequestError("bad_words holds text but the model has no tokenizer. Pass token ids.")
            else:
                words.extend(
                    list(self.tokenizer(prefix + word.lstrip(), add_special_tokens=False)["input_ids"])
                    for prefix in ("", " ")
                )
        for word in words:
            if not word:
                raise RequestError("bad_words holds an empty word. Leave it out.")
            for token in word:
                self._check_id(token, "bad_words")
        return words

    def _result(self, request_id: int, prompt: Prompt, sequences: list[Sequence]) -> RequestOutput:
        """The result of one prompt."""
        first = sequences[0]
        prompt_ids = first.tokens[: first.num_prompt]
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if not isinstance(text, str):
            text = None if self.tokenizer is None else self.tokenizer.decode(prompt_ids)
        return RequestOutput(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=prompt_ids,
            outputs=[sequence.output() for sequence in sequences],
            metrics=GenerationMetrics.total(sequence.metrics for sequence in sequences),
        )


def _loaded(model: str | LoadedModel | torch.nn.Module, dtype: str, device: str) -> LoadedModel:
    """The target, loaded where it is not yet."""
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, str):
        return load_model(model, dtype=dtype, device=device)
    return wrap_model(model, name=type(model).__name__)


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """Several prompts, also where one was given; tensors and arrays count as lists."""
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, str | Mapping | Seq):
        raise RequestError(f"the prompts are {type(prompts).__name__}. Expected text, token ids or a list of these.")
    if isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # a sequence of integers is one prompt
    return list(prompts)  # type: ignore[arg-type]
