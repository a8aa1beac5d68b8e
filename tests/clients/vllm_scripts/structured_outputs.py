"""The shape of vLLM's `structured_outputs_offline.py`: a choice, an expression, a schema and a grammar."""

from enum import StrEnum

from pydantic import BaseModel

from foretoken import LLM, SamplingParams
from foretoken.sampling_params import StructuredOutputsParams

MAX_TOKENS = 50
CHOICES = ["import", "return"]
REGEX = r"[a-z]{3,8} = \d+\n"
GRAMMAR = """
root ::= statement
statement ::= "SELECT " column " from " table " where " condition
column ::= "name " | "size "
table ::= "files " | "users "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


class Kind(StrEnum):
    file = "file"
    folder = "folder"


class Entry(BaseModel):
    kind: Kind
    is_open: bool


def generate_output(prompt: str, sampling_params: SamplingParams, llm: LLM) -> str:
    outputs = llm.generate(prompt, sampling_params=sampling_params)
    return outputs[0].outputs[0].text


def main() -> None:
    llm = LLM(model="models/tinycode", max_model_len=200)
    for title, prompt, structured_outputs in (
        ("choice", "    ", StructuredOutputsParams(choice=CHOICES)),
        ("regex", "import os\n", StructuredOutputsParams(regex=REGEX)),
        ("json", "entry = ", StructuredOutputsParams(json=Entry.model_json_schema(), disable_any_whitespace=True)),
        ("grammar", 'query = "', StructuredOutputsParams(grammar=GRAMMAR)),
    ):
        sampling_params = SamplingParams(structured_outputs=structured_outputs, max_tokens=MAX_TOKENS, seed=1)
        print(f"{title}: {generate_output(prompt, sampling_params, llm)!r}")


if __name__ == "__main__":
    main()
