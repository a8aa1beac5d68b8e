"""Checkpoints: damaged heads of every format are refused in one sentence, or they draft and cost no text."""

import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from end_to_end.tiny_heads import HEADS, head
from end_to_end.tiny_llms import llm, target
from limits import limit_memory
from made_once import new_folder, shared_folder
from tiny_models import tiny_model

from foretoken import SamplingParams
from foretoken.core.errors import ForetokenError
from foretoken.formats.checkpoint import TargetInfo
from foretoken.formats.registry import known_formats, read_head, write_head
from fuzz import engines, files
from fuzz.worker import Case, check_refusal

_PROMPTS = [[5, 6, 7, 5, 6], [9, 10]]
_PARAMS = [SamplingParams(temperature=0.0, max_tokens=10), SamplingParams(temperature=0.8, seed=1, max_tokens=10)]
_MEGABYTES = 4096


@cache
def around() -> TargetInfo:
    """The target of the heads."""
    directory = new_folder("target")
    tiny_model("llama").save_pretrained(directory)
    return TargetInfo.of_directory(str(directory))


@cache
def written(name: str, form: str, as_safetensors: bool) -> Path | None:
    """A whole head in a format, or None where the format has no room for it."""
    source = Path(head(name, steps=0)([[5, 6, 7, 8]])["speculative_config"]["model"])
    checkpoint = read_head(source, target=around().fingerprint, base_config=around().config)[1]
    directory = new_folder(form)
    try:
        write_head(form, checkpoint, directory, target=around(), as_safetensors=as_safetensors)
    except ForetokenError:
        return None
    return directory


def _source(rng: random.Random) -> tuple[str, Path]:
    """A whole head and how it is called."""
    while True:
        name, form, safe = rng.choice(sorted(HEADS)), rng.choice(known_formats(writable=True)), rng.random() < 0.7
        directory = written(name, form, safe)
        if directory is not None:
            return f"{name} as {form}{', safetensors' if safe else ''}", directory


def run(case: Case) -> None:
    """One head with one or two things wrong."""
    rng, settings = case.rng, case.settings
    what, source = _source(rng)
    with tempfile.TemporaryDirectory(dir=shared_folder()) as folder:
        directory = files.copied(source, Path(folder) / "head")
        damages = [files.damage(rng, directory) for _ in range(rng.choice([0, 1, 1, 1, 2]))]
        config: dict[str, Any] = {"model": str(directory)}
        config |= {"tree": "chain"} if rng.random() < 0.3 else {}
        config |= {"method": rng.choice(["medusa", "hydra", "mlp_speculator"])} if rng.random() < 0.2 else {}
        case.note(f"{what} with {'; '.join(damages) or 'no damage'}; {config}")
        module = target("llama", getattr(torch, settings.dtype))
        with limit_memory(_MEGABYTES << 20):
            try:
                engine = llm({"speculative_config": config}, module=module, runner=settings.runner, max_num_seqs=2)
            except ForetokenError as err:
                check_refusal(err)
                case.count("refused")
                return
            outputs = engine.generate(_PROMPTS, _PARAMS)
    case.count("drafted" if sum(output.metrics.num_drafted for output in outputs) else "accepted, drafted nothing")
    for prompt, params, output in zip(_PROMPTS, _PARAMS, outputs, strict=True):
        want = engines.alone(engines.Target.of(settings), None, prompt, params)
        engines.check_same(output.outputs[0], want.outputs[0], engines.Target.of(settings))
