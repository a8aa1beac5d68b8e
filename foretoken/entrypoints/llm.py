"""The Python API: `LLM(model, speculative_config=...).generate(prompts, sampling_params)`, as in vLLM.

Any number of threads may call one `LLM`. Iterations run one at a time, and each serves the requests of all threads.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing, nullcontext
from functools import cache, partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from tqdm.auto import tqdm

from foretoken.acceptance.select import AcceptancePolicy
from foretoken.core.backend import own_torch_state
from foretoken.core.checks import shown
from foretoken.core.errors import BuiltPerProcess, ConfigError, EngineStopped, RequestError, nearest_name_hint
from foretoken.core.sampling_params import SamplingParams, check_other_keywords
from foretoken.decoder.slot_cache import share_of_free
from foretoken.drafters.base import Drafter, DrafterOptions, TargetHandle
from foretoken.drafters.registry import create_drafter
from foretoken.drafting.choice import choose_controller, choose_for_predictions, most_nodes
from foretoken.drafting.drafting import Drafting, joint_reads
from foretoken.engine.loop import Engine
from foretoken.engine.scheduler import SlotPool
from foretoken.entrypoints import model_arguments
from foretoken.entrypoints.config import SpeculativeConfig, parse_speculative_config
from foretoken.entrypoints.drafter_files import attach_drafter, make_drafter
from foretoken.entrypoints.requests import Request, RequestReader
from foretoken.entrypoints.serving import SharedEngine
from foretoken.entrypoints.vllm_arguments import OTHER_ARGUMENTS, check_other_arguments, read_option
from foretoken.models.borrowed import count_writes
from foretoken.runner.costs import pass_costs
from foretoken.runner.runner import Runner
from foretoken.text.prompts import Message, Prompt, chat_format, ids_without_token

if TYPE_CHECKING:
    import torch

    from foretoken.core.records import StepRecord
    from foretoken.core.results import Metric, RequestOutput, StreamChunk
    from foretoken.models.loaded import LoadedModel

_DEFAULT_SEQUENCES = 8
_log = logging.getLogger(__name__)
_CLOSED = "this LLM was closed at the end of its with block. Expected calls within the block. Make another LLM."


class LLM(BuiltPerProcess):
    """A target, drafters and the engine that runs them.

    As a context manager it frees model, KV cache and drafters at the end of the block; later calls raise an error.

    Attributes:
        target: The runner.
        tokenizer: The target's tokenizer, or None.
        drafters: The attached drafters, in the order of the bits of `TokenTree.source`.
        handle: The access to the target that the drafters got.
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
        quantization: str | None = None,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool | None = None,
        kv_cache_dtype: str | None = None,
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
        check_other_arguments(others, _PARAMETERS)
        model_arguments.check_engine_arguments(locals())
        runner = "auto" if runner == "generate" else runner
        model = model_arguments.located("model", model, revision)
        directory = model_arguments.directory_of(model)
        config = parse_speculative_config(speculative_config, target=directory)
        config = config.located(directory if tokenizer is None else None)
        loaded = model_arguments.target_model(model, dtype, device, revision, quantization, kv_cache_dtype)
        model_arguments.check_context_len(max_model_len, loaded)
        self.tokenizer = model_arguments.target_tokenizer(tokenizer, model, revision, tokenizer_revision)
        self.sampling_defaults = model_arguments.sampling_defaults(
            loaded, generation_config, override_generation_config
        )

        costs = cache(partial(pass_costs, loaded))  # by decoder
        setup = _drafter_setup(drafter, config, target=loaded, is_trusted=trust_drafter)
        self.drafters: Seq[Drafter] = setup.drafters
        num_slots, num_bytes = max_num_seqs or _DEFAULT_SEQUENCES, kv_cache_memory_bytes
        if num_bytes is None and gpu_memory_utilization is not None:
            num_bytes = share_of_free(loaded.device, gpu_memory_utilization)
        with model_arguments.enough_memory(loaded, num_slots, max_model_len):
            self.target = _make_runner(
                loaded, setup, max_model_len, num_slots=num_slots, runner=runner, costs=costs,
                kv_cache_memory_bytes=num_bytes,
            )  # fmt: skip
        self.handle = TargetHandle(
            name=loaded.name,
            vocab_size=loaded.vocab_size,
            context_len=self.target.context_len,
            num_slots=num_slots,
            device=loaded.device,
            dtype=loaded.dtype,
            runner=runner,
            tokenizer=self.tokenizer,
            model=loaded,
            run=self.target.run,
            target_runner=self.target,
            measured_costs=lambda: costs(self.target.name).tree,
        )
        with model_arguments.enough_memory(loaded, num_slots, max_model_len):
            drafting = _attach_drafters(setup, config, self.target, self.handle)
        self._engine = Engine(
            self.target,
            drafting,
            policy=setup.policy,
            slots=SlotPool(num_slots, keeps_prefixes=enable_prefix_caching is None or bool(enable_prefix_caching)),
            on_step=on_step,
            max_num_batched_tokens=max_num_batched_tokens,
            impossible_ids=None if allow_unknown_ids else ids_without_token(self.tokenizer, self.target),
            has_traces=trace,
        )
        requests = RequestReader(
            self.target, self.tokenizer, None if seed is None else int(seed), self.sampling_defaults,
            has_target_text=setup.policy.rule != "synthetic",
        )  # fmt: skip
        self.shared = SharedEngine(self._engine, requests)

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
            # Python and notebooks look up attributes with these beginnings.
            if vars(self) or name.startswith(("__", "_repr_", "_ipython_")):
                raise AttributeError(f"'LLM' object has no attribute {name!r}")
            raise EngineStopped(_CLOSED)

    @property
    def is_lossy(self) -> bool:
        """Whether the acceptance rule may change the target's distribution."""
        return self._engine.acceptor.policy.is_lossy

    @property
    def acceptance(self) -> str:
        """Name of the acceptance rule, "auto" if each request has its own; see `AcceptancePolicy`."""
        return self._engine.acceptor.policy.rule

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams | None] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = False,
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
            others: Other arguments of vLLM, at neutral values.

        Returns:
            One result for each prompt, in order. A request that fails later ends with `finish_reason` "error".

        Raises:
            RequestError: When a prompt cannot be served; nothing is generated then.
        """
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            raise RequestError(f"use_tqdm is {shown(use_tqdm)}. Expected True, False, or what takes the place of tqdm.")
        check_other_keywords("generate", others, ("prompts", "sampling_params", "use_tqdm"))
        requests = self._read(prompts, sampling_params)
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
    ) -> Generator[StreamChunk]:
        """Yields chunks of text as they become certain; arguments and errors as in `generate`.

        Closing the iterator ends its requests. Any thread may make other calls while it is open.
        """
        requests = self._read(prompts, sampling_params)
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
            form: Fields of `foretoken.text.prompts.ChatFormat`: `chat_template`, `add_generation_prompt`,
                `continue_final_message`, `tools`, `chat_template_kwargs`.

        Raises:
            RequestError: When a conversation cannot be rendered or served; nothing is generated then.
        """
        return self.generate(self.chat_prompts(messages, **form), sampling_params, use_tqdm=use_tqdm)

    def chat_prompts(self, messages: Seq[Message] | Seq[Seq[Message]], **form: Any) -> list[dict[str, Any]]:
        """Returns the prompts of conversations, for `generate` and `stream`. Arguments and errors as in `chat`."""
        self.shared.check_outside()  # without a turn, so that others are served meanwhile
        return self.shared.requests.chats(messages, chat_format(form))

    def reset_prefix_cache(self) -> bool:
        """Drops all cached KV rows; returns whether the model can run on the weights.

        Call it after writes to weights through `.data`; other writes to a model in memory are noticed. Running requests
        are read again and go on with the present weights. If the result is False, they have ended with an error.
        """
        with self.shared.turn():
            count_writes(self.target.model.module)
            return self._engine.follow_weights()

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns a copy of the model's sampling defaults, which requests without parameters use."""
        return self.shared.requests.default_params()

    def get_metrics(self) -> list[Metric]:
        """Returns counts over all calls so far, under vLLM's names ("vllm:spec_decode_num_accepted_tokens") or ours."""
        with self.shared.turn():
            return self._engine.metrics()

    def get_tokenizer(self) -> Any:
        """Returns the target's tokenizer, or None."""
        return self.tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None) -> list[int]:
        """Returns the token ids of a text.

        With `add_special_tokens` they include the tokens that the tokenizer adds to a prompt. Raises `RequestError` if
        the text is not valid, certainly needs more than `most_tokens` tokens, or the model has no tokenizer.
        """
        return self.shared.requests.encode(text, add_special_tokens=add_special_tokens, most_tokens=most_tokens)

    def decode(self, token_ids: Seq[int]) -> str:
        """Returns the text of token ids, special tokens included; raises `RequestError` for ids without a token."""
        return self.shared.requests.decode(token_ids)

    def _read(self, prompts: Any, sampling_params: Any) -> list[Request]:
        self.shared.check_outside()  # without a turn, so that others are served while a grammar compiles
        return self.shared.requests.read(prompts, sampling_params)

    def chunks(self, requests: list[Request]) -> Generator[StreamChunk]:
        """Runs requests that `shared.requests` has read; yields each sequence's new tokens after every iteration."""
        prompt = {id(sequence): index for index, request in enumerate(requests) for sequence in request.sequences}
        unfinished = [sequence for request in requests for sequence in request.sequences]
        given = dict.fromkeys(prompt, 0)
        with closing(self.shared.run(unfinished)) as iterations:
            for _ in iterations:
                with self.shared.turn():
                    changed = [s for s in unfinished if s.finish_reason is not None or len(s.output_ids) > given[id(s)]]
                    unfinished = [s for s in unfinished if s.finish_reason is None]
                    chunks = [s.chunk(prompt[id(s)], given[id(s)]) for s in changed]
                    given.update((id(s), len(s.output_ids)) for s in changed)
                yield from chunks


class _DrafterSetup(NamedTuple):
    """Drafters that are not attached yet; `for_predictions` is empty if `drafters` already reads predictions."""

    drafters: list[Drafter]
    options: Seq[DrafterOptions]
    policy: AcceptancePolicy
    for_predictions: list[Drafter]


def _drafter_setup(
    make: Callable[[], Drafter] | None, config: SpeculativeConfig, *, target: LoadedModel, is_trusted: bool
) -> _DrafterSetup:
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


def _make_runner(loaded: LoadedModel, setup: _DrafterSetup, max_model_len: int | None, **options: Any) -> Runner:
    drafters = [*setup.drafters, *setup.for_predictions]
    target = Runner(
        loaded,
        context_len=max_model_len or loaded.context_len,
        max_nodes=most_nodes(drafters),
        usual_nodes=most_nodes(setup.drafters),
        taps=joint_reads(drafters).taps,
        shares_rows=True,
        **options,
    )
    if max_model_len is not None and target.context_len < max_model_len:
        raise ConfigError(
            f"max_model_len {max_model_len} needs more memory than there is. Expected at most "
            f"{target.context_len}. Lower it, or raise kv_cache_memory_bytes."
        )
    return target


def _attach_drafters(setup: _DrafterSetup, config: SpeculativeConfig, target: Runner, handle: TargetHandle) -> Drafting:
    drafters = [*setup.drafters, *setup.for_predictions]
    target.cache.reserve(0, target.cache.capacity)  # drafters may run the target while they are attached and timed
    for each in drafters:
        attach_drafter(each, handle)
    controller = None
    if setup.drafters:
        keeps_acceptance = setup.policy.rule != "synthetic"
        controller = choose_controller(
            setup.options, setup.drafters, handle, config.control, keeps_acceptance=keeps_acceptance
        )
        _check_synthetic_depth(setup)
    options = [*setup.options, *([config.for_predictions] if config.for_predictions else [])]
    drafting = Drafting(
        drafters,
        controller,
        vocab_size=handle.vocab_size,
        max_nodes=target.max_nodes,
        device=handle.device,
        for_predictions=choose_for_predictions(options, drafters, handle) if setup.for_predictions else None,
    )
    target.cache.trim(0, 0)
    return drafting


def _check_synthetic_depth(setup: _DrafterSetup) -> None:
    """Says that texts will not be the target's; raises `ConfigError` if trees are too shallow for the rates."""
    rates, deepest = setup.policy.joint_rates, sum(drafter.nodes_by_depth[-1] - 1 for drafter in setup.drafters)
    if setup.policy.rule != "synthetic":
        return
    if len(rates) > deepest:
        raise ConfigError(
            f"synthetic acceptance has rates for {len(rates)} tokens, but drafts are at most {deepest} deep. "
            f"Expected at most {deepest} rates. Draft more with num_speculative_tokens, or pass fewer rates."
        )
    _log.warning("acceptance is synthetic: drafted tokens are accepted at given rates, and texts are not the target's")


def _progress(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    if not use_tqdm:
        return nullcontext()
    make: Any = tqdm if isinstance(use_tqdm, bool) else use_tqdm
    return make(total=total, desc="Processed prompts", dynamic_ncols=True)


_Parser = TypeVar("_Parser", bound=argparse._ActionsContainer)  # a parser or an argument group
_PARAMETERS = {name: each for name, each in signature(LLM).parameters.items() if each.kind != Parameter.VAR_KEYWORD}
_NOT_TYPED = {"drafter", "on_step", "trace"}  # functions, and `trace`, which needs one


class EngineArgs:
    """Arguments of `LLM`, for `LLM.from_engine_args(args)` or `LLM(**vars(args))`; a missing one has its default."""

    def __init__(self, model: str | os.PathLike[str], **arguments: Any) -> None:
        """Takes the arguments of `LLM`; raises `ConfigError` for a name that neither `LLM` nor vLLM has."""
        for name in arguments:
            if name not in _PARAMETERS and name not in OTHER_ARGUMENTS:
                raise ConfigError(f"EngineArgs has no argument {shown(name)}. {nearest_name_hint(name, _PARAMETERS)}")
        vars(self).update(arguments, model=model)

    def __getattr__(self, name: str) -> Any:
        if name not in _PARAMETERS and name not in OTHER_ARGUMENTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return _PARAMETERS[name].default if name in _PARAMETERS else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @staticmethod
    def add_cli_args(parser: _Parser) -> _Parser:
        """Adds an option for each argument and returns the parser; its result lacks options that are not given."""
        for name in (*_PARAMETERS, *OTHER_ARGUMENTS):
            if name in _NOT_TYPED:
                continue
            option = f"--{name.replace('_', '-')}"
            is_switch = OTHER_ARGUMENTS[name].is_switch if name in OTHER_ARGUMENTS else "bool" in _type(name)
            form: dict[str, Any] = {"type": str if "str" in _type(name) else read_option}
            if is_switch:
                form = {"action": argparse.BooleanOptionalAction}
            parser.add_argument(option, default=argparse.SUPPRESS, **form)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Returns the arguments in a parser's result; raises `ConfigError` if it has no model."""
        given = {name: value for name, value in vars(args).items() if name in _PARAMETERS or name in OTHER_ARGUMENTS}
        if "model" not in given:
            raise ConfigError("there is no model among the arguments. Expected --model DIRECTORY.")
        return cls(**given)


class AsyncEngineArgs(EngineArgs):
    """Arguments for `AsyncLLM.from_engine_args(args)`; the same as `EngineArgs`."""


def _type(name: str) -> str:
    return str(_PARAMETERS[name].annotation) if name in _PARAMETERS else ""
