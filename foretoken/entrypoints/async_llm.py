"""The asynchronous face of an `LLM`: requests are submitted, streamed and aborted one by one, from any thread or task.

One thread makes the iterations. Submitting waits for none of them, and reading waits in the reader's event loop only.
"""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from foretoken.core.checks import check_integer, check_text, shown
from foretoken.core.errors import BuiltPerProcess, ConfigError, RequestError
from foretoken.core.vllm_sampling import check_other_keywords
from foretoken.entrypoints.llm import LLM
from foretoken.entrypoints.request_queue import RequestQueue
from foretoken.entrypoints.request_stream import RequestOutputs, RequestStream
from foretoken.entrypoints.serving_thread import ServingThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from foretoken.core.sampling_params import SamplingParams
    from foretoken.entrypoints.engine_args import EngineArgs
    from foretoken.text.prompts import Prompt

_LONGEST_ID = 256  # characters


class AsyncLLM(BuiltPerProcess):
    """Serves requests on an `LLM`, beside which the `LLM`'s own calls go on working.

    Requests join in the order in which they came, as soon as a slot is free. Those that cannot join wait; when too many
    wait, further ones are refused.

    ```python
    async with AsyncLLM(LLM("models/tinycode")) as engine:
        async for chunk in engine.submit("def main():", SamplingParams(max_tokens=32)):
            print(chunk.text, end="")
    ```

    Attributes:
        llm: What it serves requests on.
    """

    def __init__(self, llm: LLM, *, max_waiting_requests: int = 256, max_waiting_tokens: int | None = None) -> None:
        """Starts the engine's thread.

        Args:
            llm: May be used by others meanwhile, another `AsyncLLM` too.
            max_waiting_requests: Requests that may wait for a slot, 0 or more.
            max_waiting_tokens: Prompt tokens that may wait, over all requests; None for as many as the requests have.

        Raises:
            ConfigError: When an argument is none of these.
        """
        if not isinstance(llm, LLM):
            raise ConfigError(f"llm is {shown(llm)}. Expected an LLM: AsyncLLM(LLM(model, ...)).")
        check_integer("max_waiting_requests", max_waiting_requests, 0, error=ConfigError)
        if max_waiting_tokens is not None:
            check_integer("max_waiting_tokens", max_waiting_tokens, 0, error=ConfigError)
        self.llm = llm
        engine = llm.shared.engine
        self._queue = RequestQueue(max_waiting_requests, max_waiting_tokens, lambda: engine.num_free_slots)
        self._thread = ServingThread(llm.shared, self._queue)
        weakref.finalize(self, self._thread.close).atexit = False  # the thread sees to that

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Builds an `AsyncLLM` over a new `LLM`; raises what `LLM(...)` raises."""
        return cls(LLM.from_engine_args(engine_args))

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return self._queue.counts()[0]

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return self._queue.counts()[1]

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests; not once it was closed, its thread failed, or in a forked child."""
        return self._thread.is_alive

    @property
    def iteration_seconds(self) -> float:
        """How long the present iteration has taken so far: much more than usual where a drafter or a device hangs."""
        return self._thread.iteration_seconds

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        client: object = None,
        check: Callable[[int], None] | None = None,
    ) -> RequestStream:
        """Has a request served. Returns at once, in any thread, with or without an event loop.

        Args:
            prompt: One prompt, in any of the forms of `LLM.generate`.
            sampling_params: None for `llm.get_default_sampling_params()`.
            request_id: Its name in results; of no other request that is alive. None gives it one.
            client: Who asks, anything that can be a key of a dictionary: where slots are few, clients share them
                evenly, however many requests and completions each has. None for a client of its own.
            check: Called with the tokens of the prompt before the request waits; may refuse it by raising.

        Returns:
            What it brings.

        Raises:
            RequestError: When it cannot be served.
            QueueFull: When too many requests wait.
            EngineStopped: When no requests are served any more.
        """
        return self._begin("submit", prompt, sampling_params, request_id, client=client, check=check)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **others: Any,
    ) -> RequestOutputs:
        """Returns a request: `await` gives its whole result, `async for` the results on the way.

        ```python
        output = await engine.generate("def main():", SamplingParams(max_tokens=32))
        async for output in engine.generate("def main():", SamplingParams(output_kind=RequestOutputKind.DELTA)):
            print(output.outputs[0].text, end="")
        ```

        It is submitted then, and takes and raises what `submit` does. Being cancelled, or leaving the loop, ends it.

        Args:
            prompt: As `submit` takes it.
            sampling_params: Likewise. `output_kind` says what results on the way hold.
            request_id: Likewise.
            others: Further arguments of vLLM's, as long as they ask for nothing that is missing here.
        """
        check_other_keywords("generate", others, ("prompt", "sampling_params", "request_id"))
        return RequestOutputs(lambda: self._begin(None, prompt, sampling_params, request_id))

    def _begin(
        self,
        call: str | None,
        prompt: Any,
        sampling_params: Any,
        request_id: Any,
        *,
        client: object = None,
        check: Callable[[int], None] | None = None,
    ) -> RequestStream:
        """See `submit`; call: its name where only new parts can be asked for."""
        if request_id is not None:
            check_text("request_id", request_id)
            if not 0 < len(request_id) <= _LONGEST_ID:
                raise RequestError(f"request_id has {len(request_id)} characters. Expected 1 to {_LONGEST_ID}.")
        self._thread.check_alive()
        self._queue.check_room()  # before the prompt is read, which takes longer
        request_id = self._new_id() if request_id is None else str(request_id)
        request = self.llm.shared.requests.read_one(prompt, sampling_params, request_id)
        if call is not None:
            request.check_new_parts(call)
        if check is not None:
            check(request.num_prompt)
        client = object() if client is None else client
        for sequence in request.sequences:
            sequence.client = client
        served = self._queue.add(request, self._thread.hand_over)
        return RequestStream(self, request, served.mailbox, partial(self._thread.give_up, served))

    def abort(self, request_id: str) -> None:
        """Ends a request before the next iteration; its finish reason is "abort". No error when there is none."""
        served = self._queue.get(request_id)
        if served is not None:
            self._thread.give_up(served)

    def close(self) -> None:
        """Ends all requests, whose finish reason is "abort", and the thread. The `LLM` can still be used."""
        self._thread.close()
        self._thread.join()

    shutdown = close  # as vLLM calls it

    def _new_id(self) -> str:
        """A name that no request has."""
        names = iter(self.llm.shared.requests.new_id, None)
        return next(name for name in names if self._queue.get(name) is None)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes it, without holding up the event loop."""
        await asyncio.to_thread(self.close)
