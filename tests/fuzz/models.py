"""Models: damaged configurations, weights, indexes and tokenizers are refused in one sentence, or the model decodes.

Models with matrices in integers too. Where only what says how they are stored is damaged, a model that is not refused
has the logits of the undamaged one.
"""

import json
import tempfile
from functools import cache
from pathlib import Path

from end_to_end.tiny_llms import tokenizer
from limits import limit_memory
from made_once import new_folder, shared_folder
from models.integer_checkpoints import Scheme, small_config, write
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ForetokenError
from fuzz import files, stored_files
from fuzz.worker import Case, FindingError, check_refusal

_ARCHITECTURES = ("llama", "llama", "llama", "qwen3", "gemma2", "gpt2", "mixtral", "deepseek_v3", "opt")
_CT = "compressed-tensors"
_SCHEMES = {
    "W4A16": Scheme(_CT, zeros=True),
    "W4A16 in the order of activations": Scheme(_CT, act_order=True),
    "W8A16": Scheme(_CT, bits=8, group=0),
    "W8A8": Scheme(_CT, bits=8, group=0, settings={"format": "int-quantized", "inputs": True}),
    "GPTQ": Scheme("gptq"),
    "GPTQ with desc_act": Scheme("gptq", zeros=True, act_order=True),
    "GPTQ in 8 bits": Scheme("gptq", bits=8, group=0, zeros=True),
    "AWQ": Scheme("awq", zeros=True),
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 72, "norm_topk_prob": True}
_SETTINGS_FILES = ("quantize_config.json", "quant_config.json")
_MEGABYTES = 4096  # beyond what the process has
_FINISHED = ("length", "stop", "error")
_TOKENS = [5, 17, 3, 88, 42, 9]


@cache
def saved(architecture: str, in_shards: bool) -> Path:
    """An undamaged model with its tokenizer."""
    directory = new_folder(architecture)
    model = tiny_model(architecture)
    model.generation_config.eos_token_id = [2, 1]
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    if in_shards:
        _split(directory)
    return directory


@cache
def saved_in_integers(name: str, kind: str, in_shards: bool, settings_file: str | None) -> Path:
    """An undamaged model with matrices in integers; its settings are in config.json or a file of their own."""
    directory = new_folder("stored")
    write(directory, small_config(kind, **(_EXPERTS if kind == "qwen3_moe" else {})), _SCHEMES[name])
    if in_shards:
        _split(directory)
    if settings_file is not None:
        config = json.loads((directory / "config.json").read_text())
        (directory / settings_file).write_text(json.dumps(config.pop("quantization_config")))
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def _split(directory: Path) -> None:
    """Writes two files of weights and an index in place of one file."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    shard_of = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(sorted(tensors))}
    for shard in sorted(set(shard_of.values())):
        part = {name: tensors[name].contiguous() for name, its in shard_of.items() if its == shard}
        save_file(part, directory / shard, {"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": shard_of}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@cache
def _logprobs(directory: Path) -> dict[int, float]:
    """Log-probabilities of all tokens after a prompt, by token."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=96)
    output = LLM(directory, max_num_seqs=1).generate([_TOKENS], params)[0].outputs[0]
    if output.logprobs is None or not output.logprobs:
        raise FindingError(f"{output}")
    return {token: each.logprob for token, each in output.logprobs[0].items()}


def run(case: Case) -> None:
    """One model with one or two things wrong; one in two has matrices in integers."""
    if case.rng.random() < 0.5:
        _run_in_integers(case)
        return
    rng = case.rng
    architecture, in_shards = rng.choice(_ARCHITECTURES), rng.random() < 0.25
    with tempfile.TemporaryDirectory(dir=shared_folder()) as folder:
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


def _run_in_integers(case: Case) -> None:
    """The same for matrices in integers."""
    rng = case.rng
    name, kind = rng.choice(sorted(_SCHEMES)), rng.choice(["llama", "llama", "llama", "qwen2", "qwen3_moe"])
    kind = "llama" if _SCHEMES[name].act_order else kind
    has_file = _SCHEMES[name].method != _CT and rng.random() < 0.4
    in_shards, settings_file = rng.random() < 0.3, rng.choice(_SETTINGS_FILES) if has_file else None
    source = saved_in_integers(name, kind, in_shards, settings_file)
    with tempfile.TemporaryDirectory(dir=shared_folder()) as folder:
        directory = files.copied(source, Path(folder) / "model")
        damage = stored_files.damage(rng, directory, settings_file or "config.json")
        case.note(f"{name} ({kind}{', in shards' if in_shards else ''}, {settings_file}) with {damage.text}")
        want = _logprobs(source)
        with limit_memory(_MEGABYTES << 20):
            try:
                got = _logprobs.__wrapped__(directory)
            except ForetokenError as err:
                case.count(f"in integers, {damage.kind}: refused")
                check_refusal(err)
                return
    case.count(f"in integers, {damage.kind}: loaded")
    if damage.keeps_logits:
        worst = max(abs(got.get(token, 0.0) - value) for token, value in want.items())
        if not worst <= 1e-3:
            raise FindingError(f"loaded, and log-probabilities are wrong by {worst}")
