"""Models: damaged configurations, weights, indexes and tokenizers are refused in one sentence, or the model decodes."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

from end_to_end.tiny_llms import tokenizer
from limits import limit_memory
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ForetokenError
from fuzz import files
from fuzz.worker import Case, FindingError, check_refusal

_ARCHITECTURES = ("llama", "llama", "llama", "qwen3", "gemma2", "gpt2", "mixtral", "deepseek_v3", "opt")
_MEGABYTES = 4096  # beyond what the process has
_FINISHED = ("length", "stop", "error")


@cache
def saved(architecture: str, in_shards: bool) -> Path:
    """An undamaged model with its tokenizer."""
    directory = Path(tempfile.mkdtemp(prefix=f"foretoken-fuzz-{architecture}-"))
    model = tiny_model(architecture)
    model.generation_config.eos_token_id = [2, 1]
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    if in_shards:
        tensors = load_file(directory / "model.safetensors")
        (directory / "model.safetensors").unlink()
        shard_of = {
            name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(sorted(tensors))
        }
        for shard in sorted(set(shard_of.values())):
            part = {name: tensors[name].contiguous() for name, its in shard_of.items() if its == shard}
            save_file(part, directory / shard, {"format": "pt"})
        index = {"metadata": {"total_size": 1}, "weight_map": shard_of}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def run(case: Case) -> None:
    """One model with one or two things wrong."""
    rng = case.rng
    architecture, in_shards = rng.choice(_ARCHITECTURES), rng.random() < 0.25
    with tempfile.TemporaryDirectory(prefix="foretoken-fuzz-") as folder:
        directory = files.copied(saved(architecture, in_shards), Path(folder) / "model")
        damages = [files.damage(rng, directory) for _ in range(rng.choice([1, 1, 1, 2]))]
        case.note(f"LLM of {architecture}{' in shards' if in_shards else ''} with {'; '.join(damages)}")
        with limit_memory(_MEGABYTES << 20):
            try:
                engine = LLM(directory, max_num_seqs=2, max_model_len=rng.choice([None, 32]))
                outputs = engine.generate([[5, 6, 7], [8]], SamplingParams(temperature=0.0, max_tokens=3))
            except ForetokenError as err:
                case.count("refused")
                check_refusal(err)
                return
    case.count("decoded")
    for output in outputs:
        got = output.outputs[0]
        if got.finish_reason not in _FINISHED or not (got.token_ids or got.error):
            raise FindingError(f"{got}")
        if got.error is not None and not got.error.startswith("no token is possible"):
            raise FindingError(got.error)
