"""OpenAI's Python client: text, thoughts, tools, classes as forms, whole and streamed. Run: python FILE URL MODEL."""

import json
import sys
from typing import Literal

import openai
import pydantic

URL, MODEL = sys.argv[1:]


class Weather(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    days: int


def main() -> None:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
    ask = client.chat.completions
    tools = [openai.pydantic_function_tool(Weather, name="get_weather", description="The weather of a city.")]

    def said(text: str) -> list:
        return [{"role": "user", "content": text}]

    # Text, with thoughts.
    answer = ask.create(model=MODEL, messages=said("think"))
    assert answer.choices[0].message.content == "It rains."
    assert answer.choices[0].message.reasoning_content == "Hm, Paris."
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0

    # A call, what it gave, and the answer.
    messages = said("weather")
    message = ask.create(model=MODEL, messages=messages, tools=tools).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris", "days": 2}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    assert ask.create(model=MODEL, messages=messages, tools=tools).choices[0].message.content == "It rains."

    # Classes: of the content, of a call, and of a stream whose parts the client puts together.
    parsed = ask.parse(model=MODEL, messages=said("json"), response_format=Weather)
    assert parsed.choices[0].message.parsed == Weather(city="Paris", days=2)
    for choice in ("auto", "required"):
        parsed = ask.parse(
            model=MODEL, messages=said("weather" if choice == "auto" else "calls"), tools=tools, tool_choice=choice
        )
        assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Paris", days=2)
        assert parsed.choices[0].finish_reason == "tool_calls"
    with ask.stream(model=MODEL, messages=said("weather"), tools=tools) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == Weather(city="Paris", days=2)
    named = {"type": "function", "function": {"name": "get_weather"}}
    parts = list(ask.create(model=MODEL, messages=said("json"), tools=tools, tool_choice=named, stream=True))
    deltas = [call for part in parts for choice in part.choices for call in choice.delta.tool_calls or []]
    assert Weather.model_validate_json("".join(call.function.arguments for call in deltas)) == Weather(
        city="Paris", days=2
    )


main()
