"""The Python surface: `LLM(model, speculative_config=...).generate(prompts, sampling_params)`, in vLLM's shape.

Any number of threads may call one `LLM`: iterations are made one at a time, in turn, each serving the requests of all.
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

_SHORTEST_CONTEXT = 8  # tokens that the proof at load needs
_MOST_SEQUENCES = 1 << 16
_DEFAULT_SEQUENCES = 8
_CLOSED = "this LLM was closed at the end of its with block. Expected calls within the block. Make another LLM."


class LLM(BuiltPerProcess):
    """A target, a drafter and the engine that runs them.

    As a context manager it frees model, KV cache and drafters at the end of the block; later calls raise an error.

    Attributes:
        target: The runner.
        tokenizer: The target's tokenizer, or None.
        drafters: Attached to the target, in the order of the bits of `TokenTree.source`.
        shared: The engine behind it, which an `AsyncLLM` over it uses too.
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
        """Loads models and allocates the cache.

        Args:
            model: Directory or hub id of the target, a model loaded before, or a transformers causal LM in memory.
            speculative_config: The drafters, in the syntax of docs/methods.md: "ngram", "ngram+hass:tree=dynamic", a
                directory, or `{"method": NAME, ...}` with vLLM's keys and ours; None for plain decoding.
            drafter: Makes a drafter of your own, instead of `speculative_config`. It cannot change the text: it gets
                copies, its trees are checked, and its tokens count as chosen, not as drawn from a distribution.
            trust_drafter: Treats that drafter like the package's own: it gets the engine's lists and tensors, and its
                trees' guarantees and draft distributions are not checked.
            dtype: "auto" (float32 on CPU), "float32", "bfloat16", "float16", "float64", or a torch dtype.
            device: "auto" or a torch device.
            max_num_seqs: Sequences decoded at once; None for 8.
            max_model_len: Most tokens of a sequence, at most the model's limit, which is also the default.
            max_num_batched_tokens: Most tokens of a pass, drafted nodes and chunks of joining prompts together; at
                least one prompt token is always read. None aims at passes that take 2.4 times as long as those
                without prompts, by what passes take here.
            enable_prefix_caching: Whether prompts reuse the KV rows of a common prefix with a running sequence or the
                last one of a slot; None for True. On runners that are not exact, logits after a reused prefix
                may differ in the last bits, as between chunk sizes. Requests with different `cache_salt` share nothing.
            kv_cache_memory_bytes: Memory for the target's KV rows, allocated at once; None for half of the free memory.
                If it is too small for `max_num_seqs` sequences of `max_model_len` tokens, sequences share the rows, and
                the one that joined last waits when there are no more.
            gpu_memory_utilization: Bounds the KV rows to this share of the device's free memory, and to a half of it.
            seed: Makes requests without a seed of their own reproducible, in the order in which they come.
            tokenizer: A tokenizer, or the directory or hub id of one; None takes the model's own.
            revision: Branch, tag or commit of a hub id in `model`; None for its main branch.
            tokenizer_revision: Branch, tag or commit of `tokenizer`; None for `revision`, if both have one hub id.
            generation_config: The source of sampling defaults (temperature, top_k, top_p, min_p, repetition_penalty,
                most tokens): "auto" for the model's generation_config.json, "vllm" for none, or a directory or hub id.
            override_generation_config: Values that replace those of the file, as `{"temperature": 0.7}` or JSON.
            runner: "auto" takes an exact runner (a token gets the same bits in every pass) if one fits the model, else
                the fastest. "fastest" takes the fastest, exact or not: plain and speculative text may then differ at
                near-ties, which `foretoken verify` explains. "generic" is the transformers model itself, "lean" our own
                forward ("lean-native" or "lean-stock" choose its kernels). "generate", vLLM's value, is "auto".
            on_step: Called with every iteration's record. It may not call this LLM; when it raises, which is logged, it
                is called no more.
            allow_unknown_ids: Whether to generate ids that the tokenizer lacks, such as padding of the vocabulary.
            trace: Adds the fate of every drafted node, and why, to the records of `on_step` (`SequenceStep.trace`).
                Changes no text, and slows every iteration down.
            others: Other arguments of vLLM, at neutral values (docs/dropins.md).

        Raises:
            ConfigError: When the configuration does not fit.
            ModelError: When a model cannot be loaded or run.
        """
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
        """Frees everything at the end of a `with` block. Requests of an `AsyncLLM` on this engine go on."""
        vars(self).clear()
        gc.collect()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raises for missing attributes; after the `with` block the error says that the `LLM` is closed."""
            if vars(self) or name.startswith(
                ("__", "_repr_", "_ipython_")
            ):  # attributes that Python and notebooks look up
                raise AttributeError(f"'LLM' object has no attribute {name!r}")
            raise EngineStopped(_CLOSED)

    @property
    def is_lossy(self) -> bool:
        """Whether its acceptance rule may change what the target would have written."""
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
                what a tokenizer returns. A mapping may also hold what changes speed and nothing that is written:
                `prediction`, text or token ids that the output probably repeats in part and that are drafted, whatever
                the drafters; `cache_salt`, text: only requests with the same salt go on behind its text in the prefix
                cache, or have drafts from what it wrote; and `speculative`, a mapping with `enabled`, False for no
                drafts, or `max_nodes`, most nodes of its trees, root included.
            sampling_params: One for all prompts, or one each; None for `get_default_sampling_params()`.
            use_tqdm: Shows a progress bar on standard error; a callable takes the place of `tqdm`.
            params: Former name of `sampling_params`.
            others: Further arguments of vLLM's, as long as they ask for nothing that is missing here.

        Returns:
            One result a prompt, in order. A request that fails on the way ends with `finish_reason` "error".

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
        """Completes prompts, giving text as it becomes certain. Takes and raises what `generate` does.

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
            use_tqdm: Likewise.
            form: Fields of `foretoken.text.chats.ChatFormat`: `chat_template`, `add_generation_prompt`,
                `continue_final_message`, `tools`, `chat_template_kwargs`.

        Raises:
            RequestError: When a conversation cannot be rendered or served; nothing is generated then.
        """
        return self.generate(self.chat_prompts(messages, **form), sampling_params, use_tqdm=use_tqdm)

    def chat_prompts(self, messages: Seq[Message] | Seq[Seq[Message]], **form: Any) -> list[dict[str, Any]]:
        """The prompts of conversations, for `generate` and `stream`; takes and raises what `chat` does."""
        with self.shared.turn():
            return self._requests.chats(messages, chat_format(form))

    def reset_prefix_cache(self) -> bool:
        """Drops all cached KV rows; call it after writes to weights through `.data`.

        Other writes to the weights of a model in memory are noticed. Running requests read again what they have so far,
        and go on with the weights as they are.

        Returns:
            Whether the model can run on them; else running requests have ended with an error.
        """
        with self.shared.turn():
            count_writes(self.target.model.module)
            return self._engine.follow_weights()

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns a copy of the model's sampling defaults, which requests without parameters use."""
        return self._requests.default_params()

    def get_metrics(self) -> list[Metric]:
        """What the engine has done so far, over all calls: `Counter`, `Gauge` and `Vector` of `foretoken.core.results`.

        Names are vLLM's ("vllm:spec_decode_num_accepted_tokens") where it has one.
        """
        with self.shared.turn():
            return self._engine.metrics()

    def get_tokenizer(self) -> Any:
        """The target's tokenizer, or None."""
        return self.tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None) -> list[int]:
        """Returns the token ids of a text.

        Args:
            text: Any.
            add_special_tokens: Whether to add the special tokens that the tokenizer adds to a prompt.
            most_tokens: Text that makes more for certain, by its bytes, is refused before it is encoded; None for any.

        Raises:
            RequestError: When it is no text, too long, or nothing reads it.
        """
        return self._requests.encode(text, add_special_tokens=add_special_tokens, most_tokens=most_tokens)

    def decode(self, token_ids: Seq[int]) -> str:
        """Text of token ids, special tokens included; raises `RequestError` where there is none."""
        return self._requests.decode(token_ids)

    def _read(self, prompts: Any, sampling_params: Any, params: Any) -> list[Request]:
        """Checked requests."""
        if params is not None:
            if sampling_params is not None:
                raise RequestError("sampling_params came twice, once as params. Pass sampling_params alone.")
            warnings.warn("params is now called sampling_params, as in vLLM", DeprecationWarning, stacklevel=3)
            sampling_params = params
        self.shared.check_outside()  # no turn is taken: while a grammar is compiled, others are served
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
    """Drafters that are not attached yet, the options of those that have some, and how drafts are verified.

    Attributes:
        for_predictions: One more drafter, for requests that bring predictions; none where `drafters` has it.
    """

    drafters: list[Drafter]
    options: Seq[DrafterOptions]
    policy: AcceptancePolicy
    for_predictions: list[Drafter]


def _drafter_setup(
    make: Callable[[], Drafter] | None, config: SpeculativeConfig, *, target: LoadedModel, is_trusted: bool
) -> _DrafterSetup:
    """The drafters that are asked for.

    Args:
        make: Makes one of the caller's.
        config: What else is configured.
        target: The target.
        is_trusted: Whether drafters of others are trusted too.
    """
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
    """A progress bar over completions as a context manager, or one of None."""
    if not use_tqdm:
        return nullcontext()
    make: Any = tqdm if isinstance(use_tqdm, bool) else use_tqdm
    return make(total=total, desc="Processed prompts", dynamic_ncols=True)
