"""The shape of vLLM's `chat.py`: engine arguments from a command line, parameters assigned to, conversations."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from foretoken import LLM, EngineArgs
from foretoken.outputs import RequestOutput


def create_parser() -> ArgumentParser:
    parser = ArgumentParser()
    EngineArgs.add_cli_args(parser.add_argument_group("engine"))
    parser.set_defaults(model="models/tinycode")
    sampling_group = parser.add_argument_group("sampling")
    sampling_group.add_argument("--max-tokens", type=int)
    sampling_group.add_argument("--temperature", type=float)
    sampling_group.add_argument("--top-p", type=float)
    sampling_group.add_argument("--top-k", type=int)
    parser.add_argument("--chat-template-path", type=str)
    return parser


def main(args: dict[str, Any]) -> None:
    chosen = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    chat_template_path = args.pop("chat_template_path")
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    if chosen["max_tokens"] is not None:
        sampling_params.max_tokens = chosen["max_tokens"]
    if chosen["temperature"] is not None:
        sampling_params.temperature = chosen["temperature"]
    if chosen["top_p"] is not None:
        sampling_params.top_p = chosen["top_p"]
    if chosen["top_k"] is not None:
        sampling_params.top_k = chosen["top_k"]

    def print_outputs(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            print(f"Prompt: {output.prompt!r}")
            print(f"Output: {output.outputs[0].text!r}")

    conversation = [
        {"role": "system", "content": "Write Python."},
        {"role": "user", "content": "A class for a queue, please."},
        {"role": "assistant", "content": "class Queue:"},
        {"role": "user", "content": "And its method push?"},
    ]
    chat_template = Path(chat_template_path).read_text(encoding="utf-8")  # the bundled model has none
    print_outputs(llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=chat_template))
    conversations = [conversation for _ in range(10)]
    print_outputs(llm.chat(conversations, sampling_params, use_tqdm=True, chat_template=chat_template))


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
