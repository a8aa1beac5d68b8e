"""`foretoken generate`: complete one prompt, streaming."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli import options
from foretoken.core.errors import ConfigError


def generate(
    model: options.Model,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to complete.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="File to complete.")] = None,
    speculative_config: options.Drafters = None,
    max_tokens: options.MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set that reaches this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens with this fraction of the best one's probability.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampled text reproducible.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    runner: options.RunnerName = "auto",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Complete a prompt (--prompt, --file or standard input) and print the text as it comes.

    The text is what the target alone would have written; statistics go to standard error.
    """
    text = options.read_prompt(prompt, file)
    if speculative_config is not None and len(speculative_config) > 1:
        raise ConfigError("generate takes one --speculative-config. To compare several, use `foretoken bench`.")
    from foretoken.bench.setups import parse_setup
    from foretoken.core.sampling_params import SamplingParams

    setup = parse_setup(speculative_config[0]) if speculative_config else parse_setup("plain")
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, max_tokens=max_tokens,
        stop=stop or (), ignore_eos=ignore_eos,
    )  # fmt: skip
    from foretoken.engine.llm import LLM

    loaded, tokenizer = options.load_target(model, dtype, device, threads)
    llm = LLM(loaded, speculative_config=setup.config, tokenizer=tokenizer, max_num_seqs=1, runner=runner)
    if as_json:
        output = llm.generate(text, params)[0]
        completion = output.outputs[0]
        options.print_json({
            **options.run_header(loaded, runner=llm.target.name, setup=setup.name),
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": completion.token_ids,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "metrics": output.metrics.as_dict(),
        })  # fmt: skip
        return
    sys.stdout.write(text)
    _stream(llm, text, params)


def _stream(llm: Any, text: str, params: Any) -> None:
    """Prints text as it becomes certain, then one line of statistics on standard error."""
    import time

    begin = time.perf_counter()
    num_tokens = passes = 0
    for chunk in llm.stream(text, params):
        num_tokens += len(chunk.token_ids)
        passes += 1
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
    seconds = time.perf_counter() - begin
    sys.stdout.write("\n")
    sys.stdout.flush()
    print(
        f"[{num_tokens} tokens in {passes} target passes, {num_tokens / max(passes, 1):.2f} a pass, "
        f"{num_tokens / seconds:.1f} tokens/s, prefill included]",
        file=sys.stderr,
    )
