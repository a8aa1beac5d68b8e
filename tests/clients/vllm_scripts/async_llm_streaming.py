"""The shape of vLLM's `async_llm_streaming.py`: new text of one request after the other, as it comes."""

import asyncio

from foretoken import AsyncEngineArgs, AsyncLLM
from foretoken.sampling_params import RequestOutputKind, SamplingParams


async def stream_response(engine: AsyncLLM, prompt: str, request_id: str) -> None:
    print(f"Prompt: {prompt!r}")
    sampling_params = SamplingParams(
        max_tokens=40, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
    )
    async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=sampling_params):
        for completion in output.outputs:
            new_text = completion.text
            if new_text:
                print(f"New: {new_text!r}", flush=True)
        if output.finished:
            print("Generation complete!")
            break


async def main() -> None:
    engine_args = AsyncEngineArgs(model="models/tinycode", enforce_eager=True)
    engine = AsyncLLM.from_engine_args(engine_args)
    try:
        for i, prompt in enumerate(["def main():\n", "class Queue:\n", "import os\nimport "], 1):
            await stream_response(engine, prompt, f"stream-example-{i}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
