"""Results, where vLLM has them: `from foretoken.outputs import RequestOutput`."""

from foretoken.core.results import CompletionOutput, Logprob, RequestOutput, StreamChunk

__all__ = ["CompletionOutput", "Logprob", "RequestOutput", "StreamChunk"]
