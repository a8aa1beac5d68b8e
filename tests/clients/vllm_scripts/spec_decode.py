"""The shape of vLLM's `spec_decode_offline.py`: a method from the command line, prompts as token ids, acceptance."""

from argparse import ArgumentParser, Namespace
from typing import Any

from transformers import AutoTokenizer

from foretoken import LLM, SamplingParams
from foretoken.core.results import Counter, Vector
from foretoken.inputs import TokensPrompt

TEXTS = ["def read_config(path):\n", "class Queue:\n", "for index in range("]


def parse_args() -> Namespace:
    parser = ArgumentParser()
    parser.add_argument("--method", type=str, default="eagle", choices=["ngram", "eagle", "eagle3", "draft_model"])
    parser.add_argument("--num-spec-tokens", type=int, default=2)
    parser.add_argument("--prompt-lookup-max", type=int, default=5)
    parser.add_argument("--prompt-lookup-min", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--enable-chunked-prefill", action="store_true")
    parser.add_argument("--temp", type=float, default=0)
    parser.add_argument("--output-len", type=int, default=48)
    parser.add_argument("--max-num-seqs", type=int, default=None)
    parser.add_argument("--drafter-dir", type=str, default="models/tinycode-eagle")
    return parser.parse_args()


def main(args: Namespace) -> None:
    model_dir = "models/tinycode"
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    prompt_ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    speculative_config: dict[str, Any] = {"method": args.method, "num_speculative_tokens": args.num_spec_tokens}
    if args.method == "ngram":
        speculative_config["prompt_lookup_max"] = args.prompt_lookup_max
        speculative_config["prompt_lookup_min"] = args.prompt_lookup_min
    else:
        speculative_config |= {"model": args.drafter_dir, "parallel_drafting": False}
        speculative_config["disable_padded_drafter_batch"] = False
    llm = LLM(
        model=model_dir,
        trust_remote_code=True,
        tensor_parallel_size=args.tp,
        enable_chunked_prefill=args.enable_chunked_prefill,
        enforce_eager=args.enforce_eager,
        gpu_memory_utilization=0.9,
        speculative_config=speculative_config,
        disable_log_stats=False,
        max_model_len=512,
        limit_mm_per_prompt={"image": 5},
        disable_chunked_mm_input=True,
        max_num_seqs=args.max_num_seqs,
        allowed_local_media_path="",
    )
    sampling_params = SamplingParams(temperature=args.temp, max_tokens=args.output_len)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompt_ids], sampling_params=sampling_params)
    for output in outputs:
        print(f"generated text: {output.outputs[0].text!r}")
    total_num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_drafts = num_draft_tokens = num_accepted_tokens = 0
    acceptance_counts = [0] * args.num_spec_tokens
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            assert isinstance(metric, Counter)
            num_drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_draft_tokens":
            assert isinstance(metric, Counter)
            num_draft_tokens += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            assert isinstance(metric, Counter)
            num_accepted_tokens += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            assert isinstance(metric, Vector)
            for pos in range(len(metric.values)):
                acceptance_counts[pos] += metric.values[pos]
    print(f"total_num_output_tokens: {total_num_output_tokens}")
    print(f"num_drafts: {num_drafts}")
    print(f"num_draft_tokens: {num_draft_tokens}")
    print(f"num_accepted_tokens: {num_accepted_tokens}")
    print(f"mean acceptance length: {1 + num_accepted_tokens / num_drafts if num_drafts else 1:.4f}")
    for i, count in enumerate(acceptance_counts):
        print(f"acceptance at token {i}: {count / num_drafts if num_drafts else 0:.4f}")


if __name__ == "__main__":
    main(parse_args())
