"""litellm: text, thoughts and tools, whole and streamed. Run: python FILE URL MODEL."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network when it is imported
import litellm

URL, MODEL = sys.argv[1:]
TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object", "required": ["city", "days"],
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}]  # fmt: skip


def ask(text: str | list, **more: object) -> object:
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    return litellm.completion(
        model=f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", messages=messages, max_retries=0, **more
    )


def main() -> None:
    message = ask("think").choices[0].message
    assert (message.content, message.reasoning_content) == ("It rains.", "Hm, Paris.")
    deltas = [part.choices[0].delta for part in ask("think", stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "It rains."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm, Paris."

    whole = ask("weather", tools=TOOLS)
    streamed = litellm.stream_chunk_builder(list(ask("weather", tools=TOOLS, stream=True)))
    for answer in (whole, streamed):
        assert answer.choices[0].finish_reason == "tool_calls"
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris", "days": 2}
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        talk = [{"role": "user", "content": "weather"}, message.model_dump(), result]
        assert ask(talk, tools=TOOLS).choices[0].message.content == "It rains."
    forced = ask("calls", tools=TOOLS, tool_choice="required").choices[0].message.tool_calls
    assert json.loads(forced[0].function.arguments) == {"city": "Paris", "days": 2}


main()
