"""Sampling parameters, where vLLM has them: `from foretoken.sampling_params import SamplingParams`."""

from foretoken.core.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
