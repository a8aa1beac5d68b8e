"""The command `llm`: a prompt, a schema, and a Python function as a tool. Run: python FILE URL MODEL."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL, MODEL = sys.argv[1:]
FUNCTION = 'def get_weather(city: str, days: int) -> str:\n    "The weather of a city."\n    return f"rain in {city}"\n'


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "model_id": MODEL, "model_name": MODEL, "api_base": f"{URL}/v1", "supports_tools": True,
            "supports_schema": True, "can_stream": True,
        }  # fmt: skip
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([settings]), encoding="utf-8")
        environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}

        def llm(*arguments: str) -> str:
            command = [sys.executable, "-m", "llm", "-m", MODEL, *arguments]
            return subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=True
            ).stdout.strip()

        for options in ([], ["--no-stream"]):
            assert llm("answer", *options) == "It rains."
            assert json.loads(llm("json", "--schema", "city, days int", *options)) == {"city": "Paris", "days": 2}
            assert llm("weather", "--functions", FUNCTION, *options).endswith("It rains.")
        logged = json.loads(subprocess.run(
            [sys.executable, "-m", "llm", "logs", "-n", "1", "--json"],
            env=environment, stdout=subprocess.PIPE, text=True, check=True,
        ).stdout)  # fmt: skip
        assert "rain in Paris" in json.dumps(logged), "the tool was called with what the model wrote"


main()
