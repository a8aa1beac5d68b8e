"""The shape of vLLM's `prefix_caching_offline.py`: the same texts with a shared beginning that is read once."""

from foretoken import LLM, SamplingParams

prefix = '"""Reads and writes configuration files."""\n\nimport json\nimport os\nfrom pathlib import Path\n\n\n'
prompts = ["def read_config(path):\n", "def write_config(path, values):\n", "class Config:\n", "def main():\n"]
generating_prompts = [prefix + prompt for prompt in prompts]
sampling_params = SamplingParams(temperature=0.0)


def main() -> None:
    with LLM(model="models/tinycode", enable_prefix_caching=False, gpu_memory_utilization=0.4) as regular_llm:
        outputs = regular_llm.generate(generating_prompts, sampling_params)
    regular_generated_texts = [output.outputs[0].text for output in outputs]

    prefix_cached_llm = LLM(model="models/tinycode", enable_prefix_caching=True, gpu_memory_utilization=0.4)
    prefix_cached_llm.generate(generating_prompts[0], sampling_params)
    outputs = prefix_cached_llm.generate(generating_prompts, sampling_params)
    cached_generated_texts = []
    for output in outputs:
        generated_text = output.outputs[0].text
        cached_generated_texts.append(generated_text)
        print(f"Prompt: {output.prompt!r}\nOutput: {generated_text!r}")
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens were not read again")
    generated_same = all(regular_generated_texts[i] == cached_generated_texts[i] for i in range(len(prompts)))
    print(f"Generated answers are the same: {generated_same}")


if __name__ == "__main__":
    main()
