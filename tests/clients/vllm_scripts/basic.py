"""The shape of vLLM's `basic.py` and `metrics.py`: prompts in, texts out, figures of the engine."""

from foretoken import LLM, SamplingParams
from foretoken.core.results import Counter, Gauge, Vector

prompts = ["import os\nimport ", "def read_config(path):\n", "class Queue:\n", "for index in range("]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=7)


def main() -> None:
    llm = LLM(model="models/tinycode", disable_log_stats=False)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        generated_text = output.outputs[0].text
        print(f"Prompt: {output.prompt!r}")
        print(f"Output: {generated_text!r}")
    for metric in llm.get_metrics():
        if isinstance(metric, Gauge):
            print(f"{metric.name} (gauge) = {metric.value}")
        elif isinstance(metric, Counter):
            print(f"{metric.name} (counter) = {metric.value}")
        elif isinstance(metric, Vector):
            print(f"{metric.name} (vector) = {metric.values}")


if __name__ == "__main__":
    main()
