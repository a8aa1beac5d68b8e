"""The Python API: `LLM(model, speculative_config=...).generate(prompts, sampling_params)`, as in vLLM.

Any number of threads may call one `LLM`. Iterations run one at a time, and each serves the requests of all threads.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import closing, nullcontext
from functools import cache, partial
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tqdm.auto import tqdm

from foretoken.acceptance.select import AcceptancePolicy
from foretoken.core.checks import check_boolean, check_integer, check_number, check_text, shown
from foretoken.core.errors import BuiltPerProcess, ConfigError, EngineStopped, RequestError
from foretoken.core.torch_state import own_torch_state
from foretoken.core.vllm_sampling import check_other_keywords
from foretoken.decoder.memory import share_of_free
from foretoken.drafters.base import TargetHandle
from foretoken.drafters.registry import create_drafter
from foretoken.drafting.drafting import (
    Drafting,
    choose_controller,
    choose_for_predictions,
    joint_reads,
    most_nodes,
    room_beside_prompts,
)
from foretoken.engine.loop import Engine
from foretoken.engine.scheduler import SlotPool
from foretoken.entrypoints.config import parse_speculative_config
from foretoken.entrypoints.drafter_files import attach_drafter, make_drafter
from foretoken.entrypoints.model_arguments import directory_of, sampling_defaults, target_model, target_tokenizer
from foretoken.entrypoints.requests import Request, RequestReader
from foretoken.entrypoints.shared_engine import SharedEngine
from foretoken.entrypoints.vllm_arguments import check_other_arguments
from foretoken.models.model_changes import count_writes
from foretoken.runner.costs import pass_costs
from foretoken.runner.runner import Runner
from foretoken.text.chats import chat_format
from foretoken.text.prompts import ids_without_token

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Generator, Mapping
    from collections.abc import Sequence as Seq

    import torch

    from foretoken.core.records import StepRecord
    from foretoken.core.results import Metric, RequestOutput, StreamChunk
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.drafters.base import Drafter
    from foretoken.drafters.options import DrafterOptions
    from foretoken.entrypoints.config import SpeculativeConfig
    from foretoken.entrypoints.engine_args import EngineArgs
    from foretoken.models.loading import LoadedModel
    from foretoken.runner.costs import CostCurve
    from foretoken.text.chats import Message
    from foretoken.text.prompts import Prompt

_SHORTEST_CONTEXT = 8  # tokens; the check of the decoder at load needs as many
_MOST_SEQUENCES = 1 << 16
_DEFAULT_SEQUENCES = 8
_CLOSED = "this LLM was closed at the end of its with block. Expected calls within the block. Make another LLM."


class LLM(BuiltPerProcess):
    """A target, drafters and the engine that runs them.

    As a context manager it frees model, KV cache and drafters at the end of the block; later calls raise an error.

    Attributes:
        target: The runner.
        tokenizer: The target's tokenizer, or None.
        drafters: The attached drafters, in the order of the bits of `TokenTree.source`.
        shared: The engine, which an `AsyncLLM` over this `LLM` uses too.
        sampling_defaults: Fields of `SamplingParams` that the model's generation configuration sets, by name.
    """

    @own_torch_state()
    def __init__(  # noqa: PLR0913 - vLLM's surface
        self,
        model: str | os.PathLike[str] | LoadedModel | torch.nn.Module,
        *,
        speculative_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        drafter: Callable[[], Drafter] | None = None,
        trust_drafter: bool = False,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool | None = None,
        kv_cache_memory_bytes: int | None = None,
        gpu_memory_utilization: float | None = None,
        seed: int | None = None,
        tokenizer: Any = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        generation_config: str | os.PathLike[str] = "auto",
        override_generation_config: Mapping[str, Any] | str | None = None,
        runner: str = "auto",
        on_step: Callable[[StepRecord], None] | None = None,
        allow_unknown_ids: bool = False,
        trace: bool = False,
        **others: Any,
    ) -> None:
        check_other_arguments(others, [name for name in signature(LLM).parameters if name != "others"])
        if speculative_config is not None and drafter is not None:
            raise ConfigError("speculative_config and drafter exclude each other. Pass one of them.")
        max_num_seqs = _DEFAULT_SEQUENCES if max_num_seqs is None else max_num_seqs
        check_integer("max_num_seqs", max_num_seqs, 1, _MOST_SEQUENCES, error=ConfigError)
        for name, value, least in (
            ("max_model_len", max_model_len, _SHORTEST_CONTEXT),
            ("max_num_batched_tokens", max_num_batched_tokens, 1),
            ("kv_cache_memory_bytes", kv_cache_memory_bytes, 1),
        ):
            if value is not None:
                check_integer(name, value, least, error=ConfigError)
        share = 1.0 if gpu_memory_utilization is None else gpu_memory_utilization
        check_number("gpu_memory_utilization", share, 0.0, 1.0, low_open=True, error=ConfigError)
        keeps_prefixes = True if enable_prefix_caching is None else enable_prefix_caching
        check_boolean("enable_prefix_caching", keeps_prefixes, error=ConfigError)
        if seed is not None:
            check_integer("seed", seed, error=ConfigError)
            seed = int(seed)
        check_text("runner", runner, error=ConfigError)
        runner = "auto" if runner == "generate" else runner
        if drafter is not None and not callable(drafter):
            raise ConfigError(f"drafter is {shown(drafter)}. Expected a function that makes one.")
        if on_step is not None and not callable(on_step):
            raise ConfigError(f"on_step is {shown(on_step)}. Expected a function that takes a StepRecord.")
        check_boolean("trust_drafter", trust_drafter, error=ConfigError)
        check_boolean("allow_unknown_ids", allow_unknown_ids, error=ConfigError)
        check_boolean("trace", trace, error=ConfigError)
        if trace and on_step is None:
            raise ConfigError(
                "trace is True but there is no on_step to get the traces. Pass on_step, or leave trace out."
            )
        config = parse_speculative_config(speculative_config, target=directory_of(model))
        loaded = target_model(model, dtype, device, revision)
        if max_model_len is not None and max_model_len > loaded.context_len:
            raise ConfigError(
                f"max_model_len is {shown(max_model_len)}, but '{loaded.name}' has a context of {loaded.context_len} "
                "tokens. Expected at most that. Leave it out for the model's limit."
            )
        self.tokenizer = target_tokenizer(tokenizer, model, revision, tokenizer_revision)
        self.sampling_defaults = sampling_defaults(loaded, generation_config, override_generation_config)

        costs = cache(partial(pass_costs, loaded))  # by decoder
        setup = _drafter_setup(drafter, config, target=loaded, is_trusted=trust_drafter)
        self.drafters: Seq[Drafter] = setup.drafters
        drafters = [*setup.drafters, *setup.for_predictions]
        context_len, reads = max_model_len or loaded.context_len, joint_reads(drafters)
        self.target = Runner(
            loaded,
            num_slots=max_num_seqs,
            context_len=context_len,
            max_nodes=most_nodes(drafters),
            usual_nodes=most_nodes(self.drafters),
            taps=reads.taps,
            runner=runner,
            costs=costs,
            shares_rows=True,
            kv_cache_memory_bytes=kv_cache_memory_bytes
            or (None if gpu_memory_utilization is None else share_of_free(loaded.device, share)),
        )
        if max_model_len is not None and self.target.context_len < max_model_len:
            raise ConfigError(
                f"max_model_len {max_model_len} needs more memory than there is. Expected at most "
                f"{self.target.context_len}. Lower it, or raise kv_cache_memory_bytes."
            )

        def tree_costs() -> CostCurve:
            return costs(self.target.name).tree

        handle = TargetHandle(
            name=loaded.name,
            vocab_size=loaded.vocab_size,
            context_len=self.target.context_len,
            num_slots=max_num_seqs,
            device=loaded.device,
            dtype=loaded.dtype,
            runner=runner,
            tokenizer=self.tokenizer,
            model=loaded,
            run=self.target.run,
            draft_trees=self.target.draft_trees,
            measured_costs=tree_costs,
        )
        self.target.cache.reserve(0, self.target.cache.capacity)  # where drafters that are made or timed run the target
        for each in drafters:
            attach_drafter(each, handle)
        controller = choose_controller(setup.options, self.drafters, handle) if self.drafters else None
        options = [*setup.options, *([config.for_predictions] if config.for_predictions else [])]
        self._engine = Engine(
            self.target,
            Drafting(
                drafters,
                controller,
                vocab_size=loaded.vocab_size,
                max_nodes=self.target.max_nodes,
                device=loaded.device,
                beside_prompts=None if controller is None else room_beside_prompts(controller, handle),
                for_predictions=choose_for_predictions(options, drafters, handle) if setup.for_predictions else None,
            ),
            policy=setup.policy,
            slots=SlotPool(max_num_seqs, keeps_prefixes=keeps_prefixes),
            on_step=on_step,
            max_num_batched_tokens=max_num_batched_tokens,
            impossible_ids=None if allow_unknown_ids else ids_without_token(self.tokenizer, self.target),
            has_traces=trace,
        )
        self.target.cache.trim(0, 0)
        self._requests = RequestReader(self.target, self.tokenizer, seed, self.sampling_defaults)
        self.shared = SharedEngine(self._engine, self._requests)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Builds an `LLM` from `EngineArgs`; raises what `LLM(...)` raises."""
        given = getattr(engine_args, "__dict__", {})
        if "model" not in given:
            raise ConfigError(f"engine_args is {shown(engine_args)}. Expected EngineArgs(model=DIRECTORY, ...).")
        return cls(**given)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        vars(self).clear()
        gc.collect()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if vars(self) or name.startswith(
                ("__", "_repr_", "_ipython_")
            ):  # attributes that Python and notebooks look up
                raise AttributeError(f"'LLM' object has no attribute {name!r}")
            raise EngineStopped(_CLOSED)

    @property
    def is_lossy(self) -> bool:
        """Whether the acceptance rule may change the target's distribution."""
        return self._engine.policy.is_lossy

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams | None] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
        params: SamplingParams | Seq[SamplingParams] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Completes prompts. May be called from several threads at once.

        Args:
            prompts: A string, a list of token ids, a mapping with `prompt` or `prompt_token_ids`, several of these, or
                the output of a tokenizer. A mapping may also hold three keys that change speed alone. `prediction`:
                text or token ids that the output probably repeats in part, which are drafted with any drafter.
                `cache_salt`: text; only requests with the same salt share cached prefixes and drafts from outputs.
                `speculative`: a mapping with `enabled`, False for no drafts, or `max_nodes`, the most nodes of a tree,
                root included.
            sampling_params: One for all prompts, or one each; None for `get_default_sampling_params()`.
            use_tqdm: Whether to show a progress bar on standard error; a callable replaces `tqdm`.
            params: Former name of `sampling_params`.
            others: Other arguments of vLLM, at neutral values.

        Returns:
            One result for each prompt, in order. A request that fails later ends with `finish_reason` "error".

        Raises:
            RequestError: When a prompt cannot be served; nothing is generated then.
        """
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            raise RequestError(f"use_tqdm is {shown(use_tqdm)}. Expected True, False, or what takes the place of tqdm.")
        check_other_keywords("generate", others, ("prompts", "sampling_params", "use_tqdm"))
        requests = self._read(prompts, sampling_params, params)
        sequences = [sequence for request in requests for sequence in request.sequences]
        with _progress(use_tqdm, len(sequences)) as bar:
            for _ in self.shared.run(sequences):
                if bar is not None:
                    bar.update(sum(s.finish_reason is not None for s in sequences) - bar.n)
        with self.shared.turn():
            return [request.output() for request in requests]

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams | None] | None = None,
        *,
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Generator[StreamChunk]:
        """Yields chunks of text as they become certain. Arguments and errors as in `generate`.

        Closing the iterator ends its requests. Any thread may make other calls while it is open.
        """
        requests = self._read(prompts, sampling_params, params)
        for request in requests:
            request.check_new_parts("stream")
        return self.chunks(requests)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams | None] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        **form: Any,
    ) -> list[RequestOutput]:
        """Answers conversations, rendered by the tokenizer's chat template; the rendered text is `output.prompt`.

        Args:
            messages: A conversation, `[{"role": "user", "content": "text"}, ...]`, or several.
            sampling_params: As `generate` takes them.
            use_tqdm: As `generate` takes it.
            form: Fields of `foretoken.text.chats.ChatFormat`: `chat_template`, `add_generation_prompt`,
                `continue_final_message`, `tools`, `chat_template_kwargs`.

        Raises:
            RequestError: When a conversation cannot be rendered or served; nothing is generated then.
        """
        return self.generate(self.chat_prompts(messages, **form), sampling_params, use_tqdm=use_tqdm)

    def chat_prompts(self, messages: Seq[Message] | Seq[Seq[Message]], **form: Any) -> list[dict[str, Any]]:
        """Returns the prompts of conversations, for `generate` and `stream`. Arguments and errors as in `chat`."""
        with self.shared.turn():
            return self._requests.chats(messages, chat_format(form))

    def reset_prefix_cache(self) -> bool:
        """Drops all cached KV rows. Call it after writes to weights through `.data`.

        Other writes to the weights of a model in memory are noticed. Running requests are read again and go on with the
        present weights.

        Returns:
            Whether the model can run on the weights. If not, running requests have ended with an error.
        """
        with self.shared.turn():
            count_writes(self.target.model.module)
            return self._engine.follow_weights()

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns a copy of the model's sampling defaults, which requests without parameters use."""
        return self._requests.default_params()

    def get_metrics(self) -> list[Metric]:
        """Returns counts over all calls so far: `Counter`, `Gauge` and `Vector` of `foretoken.core.results`.

        Names are vLLM's ("vllm:spec_decode_num_accepted_tokens") where it has one.
        """
        with self.shared.turn():
            return self._engine.metrics()

    def get_tokenizer(self) -> Any:
        """Returns the target's tokenizer, or None."""
        return self.tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: The text.
            add_special_tokens: Whether to add the special tokens that the tokenizer adds to a prompt.
            most_tokens: Refuses text before encoding, if its bytes need more tokens for certain; None for no limit.

        Raises:
            RequestError: When it is not text or too long, or the model has no tokenizer.
        """
        return self._requests.encode(text, add_special_tokens=add_special_tokens, most_tokens=most_tokens)

    def decode(self, token_ids: Seq[int]) -> str:
        """Returns the text of token ids, special tokens included; raises `RequestError` if they have none."""
        return self._requests.decode(token_ids)

    def _read(self, prompts: Any, sampling_params: Any, params: Any) -> list[Request]:
        if params is not None:
            if sampling_params is not None:
                raise RequestError("sampling_params came twice, once as params. Pass sampling_params alone.")
            warnings.warn("params is now called sampling_params, as in vLLM", DeprecationWarning, stacklevel=3)
            sampling_params = params
        self.shared.check_outside()  # without a turn, so that others are served while a grammar compiles
        return self._requests.read(prompts, sampling_params)

    def chunks(self, requests: list[Request]) -> Generator[StreamChunk]:
        """Runs requests that `shared.requests` has read; yields each sequence's new tokens after every iteration."""
        place = {id(sequence): index for index, request in enumerate(requests) for sequence in request.sequences}
        unfinished = [sequence for request in requests for sequence in request.sequences]
        given = dict.fromkeys(place, 0)
        with closing(self.shared.run(unfinished)) as iterations:
            for _ in iterations:
                with self.shared.turn():
                    changed = [s for s in unfinished if s.finish_reason is not None or len(s.output_ids) > given[id(s)]]
                    unfinished = [s for s in unfinished if s.finish_reason is None]
                    chunks = [s.chunk(place[id(s)], given[id(s)]) for s in changed]
                    given.update((id(s), len(s.output_ids)) for s in changed)
                yield from chunks


class _DrafterSetup(NamedTuple):
    """Drafters that are not attached yet, with their options and the acceptance rule.

    Attributes:
        for_predictions: The drafter for requests with predictions; empty if `drafters` already reads predictions.
    """

    drafters: list[Drafter]
    options: Seq[DrafterOptions]
    policy: AcceptancePolicy
    for_predictions: list[Drafter]


def _drafter_setup(
    make: Callable[[], Drafter] | None, config: SpeculativeConfig, *, target: LoadedModel, is_trusted: bool
) -> _DrafterSetup:
    """Makes the requested drafters: the caller's if `make` is given, else those of `config`."""
    predicting = [create_drafter(config.for_predictions, target)] if config.for_predictions else []
    if make is not None:
        maker = "the drafter function"
        made = make_drafter(make, maker=maker, is_trusted=is_trusted, device=target.device)
        return _DrafterSetup([made], [], AcceptancePolicy(), predicting)
    drafters = [
        make_drafter(
            partial(create_drafter, options, target), maker=f"method '{options.method}'",
            is_trusted=options.is_trusted or is_trusted, device=target.device,
        )
        for options in config.options
    ]  # fmt: skip
    return _DrafterSetup(drafters, config.options, config.policy, predicting)


def _progress(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    if not use_tqdm:
        return nullcontext()
    make: Any = tqdm if isinstance(use_tqdm, bool) else use_tqdm
    return make(total=total, desc="Processed prompts", dynamic_ncols=True)
