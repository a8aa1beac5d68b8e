"""LangChain's ChatOpenAI: tools and forms by all its methods, whole and streamed. Run: python FILE URL MODEL."""

import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    days: int


@tool
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"rain in {city} for {days} days"


def main() -> None:
    chat = ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_retries=0)
    assert chat.invoke("answer").content == "It rains."
    assert "".join(part.content for part in chat.stream("answer")) == "It rains."

    expected = Weather(city="Paris", days=2)
    for method in ("json_schema", "function_calling", "json_mode"):
        bound = chat.with_structured_output(Weather, method=method)
        assert bound.invoke("json") == expected, method
        assert list(bound.stream("json"))[-1] == expected, method
    raw = chat.with_structured_output(Weather, include_raw=True).invoke("json")
    assert raw["parsed"] == expected
    assert raw["parsing_error"] is None

    agent = chat.bind_tools([get_weather])
    question = HumanMessage("weather")
    whole = agent.invoke([question])
    streamed = None
    for part in agent.stream([question]):
        streamed = part if streamed is None else streamed + part
    for message in (whole, streamed):
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris", "days": 2})
        result = get_weather.invoke(call)
        assert isinstance(result, ToolMessage)
        assert agent.invoke([question, message, result]).content == "It rains."
    for choice in ("any", "required"):
        (call,) = chat.bind_tools([get_weather], tool_choice=choice).invoke("calls").tool_calls
        assert call["args"] == {"city": "Paris", "days": 2}
    (call,) = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("json").tool_calls
    assert call["args"] == {"city": "Paris", "days": 2}


main()
