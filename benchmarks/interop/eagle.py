"""Runs the draft networks of SafeAILab/EAGLE, SpecForge, SGLang and vLLM on what foretoken writes of EAGLE heads.

The first two are loaded as EAGLE's `EaModel` does: its own configuration class, then the state dictionary leniently.
All are fed the text itself, the feature of one position beside the token of the next. Their first steps are compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.interop.borrowed import UnusableError, borrow
from benchmarks.interop.outcome import Outcome, compared
from benchmarks.interop.samples import BATCH, LENGTH, E, H, Target, V, given_files, random_head, written
from foretoken.formats.conversion import EAGLE_CODE, SGLANG, SPECFORGE, VLLM_EAGLE
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.eagle import EagleConfig
from foretoken.heads.eagle3 import Eagle3Config

if TYPE_CHECKING:
    from foretoken.formats.checkpoint import HeadCheckpoint

    Read = Callable[[Path, Target, bool], list[Tensor]]

_LAYER = LayerConfig(num_attention_heads=H, num_key_value_heads=2, head_dim=E // H, intermediate_size=24)
_LAYERS, _VD = 12, 61
_FORMATS = {"eagle": ("eagle",), "eagle3": ("eagle3", "speculators")}
_LINEAR = {"rope_type": "linear", "factor": 4}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}  # fmt: skip
# Name, whether EAGLE-3, changes of the head, changes of its block.
_CASES: tuple[tuple[str, bool, dict[str, Any], dict[str, Any]], ...] = (
    ("EAGLE-1, a bias", False, {"has_bias": True}, {}),
    ("EAGLE-1, no bias", False, {"has_bias": False}, {}),
    ("EAGLE-1, biased attention", False, {}, {"attention_bias": True}),
    ("EAGLE-1, rope_theta 500000", False, {}, {"rope_theta": 5e5}),
    ("EAGLE-1, linear scaling", False, {}, {"rope_scaling": _LINEAR}),
    ("EAGLE-1, linear scaling, rope_theta 500000", False, {}, {"rope_scaling": _LINEAR, "rope_theta": 5e5}),
    ("EAGLE-1, linear scaling by 1", False, {}, {"rope_scaling": {**_LINEAR, "factor": 1}}),
    ("EAGLE-1, Llama 3's scaling", False, {}, {"rope_scaling": _LLAMA3}),
    ("EAGLE-3, a part of the vocabulary", True, {}, {}),
    ("EAGLE-3, the whole vocabulary", True, {"draft_vocab_size": None}, {}),
    ("EAGLE-3, an embedding of its own", True, {"own_embedding": True}, {}),
    ("EAGLE-3, narrower than the target", True, {"draft_hidden_size": E // 2, "own_embedding": True}, {"head_dim": 2}),
    ("EAGLE-3, rope_theta 500000", True, {}, {"rope_theta": 5e5}),
    ("EAGLE-3, linear scaling", True, {}, {"rope_scaling": _LINEAR}),
    ("EAGLE-3, linear scaling, rope_theta 500000", True, {}, {"rope_scaling": _LINEAR, "rope_theta": 5e5}),
    ("EAGLE-3, Llama 3's scaling", True, {}, {"rope_scaling": _LLAMA3}),
    ("EAGLE-3, biased attention", True, {}, {"attention_bias": True}),
    ("EAGLE-3, norms of taps", True, {"fc_norms": True}, {}),
    ("EAGLE-3, two taps", True, {"boundaries": (2, 9)}, {}),
    ("EAGLE-3, heads of another size", True, {}, {"head_dim": 6}),
)


def official(root: Path, target: Target, work: Path) -> Iterator[Outcome]:
    """Every case in SafeAILab/EAGLE."""
    names = ("eagle.model.cnets1", "eagle.model.cnets", "eagle.model.configs")
    one, three, configs = borrow(root, *names)

    def read(place: Path, around: Target, is_eagle3: bool) -> list[Tensor]:
        config = configs.EConfig.from_pretrained(str(place / "config.json"))
        stated = json.loads((place / "config.json").read_text())
        for key in ("rope_scaling", "rope_theta"):  # which transformers 5 rewrites
            object.__setattr__(config, key, stated[key])
        network = (three if is_eagle3 else one).Model(config, bias=config.bias if not is_eagle3 else False)
        if "target_hidden_size" not in vars(config):  # as it takes the target's, from a target in several files
            network.embed_tokens.weight.data = _embedding(around).clone()
        if is_eagle3 and config.vocab_size == config.draft_vocab_size:
            del network.d2t, network.t2d
        network.load_state_dict(torch.load(place / "pytorch_model.bin", weights_only=True), strict=False)
        features, tokens = _texts(around, len(_boundaries(place)) if is_eagle3 else 1)
        hidden = network.eval()(features[:, :-1], tokens[:, 1:])
        return [network.lm_head(network.norm(hidden)) if is_eagle3 else around.parts.lm_head(hidden)]

    yield from _outcomes(EAGLE_CODE, _CASES, read, target, work)


def specforge(root: Path, target: Target, work: Path) -> Iterator[Outcome]:
    """The cases of EAGLE-3 in SpecForge."""
    stand_ins: dict[str, dict[str, Any]] = {
        "specforge.distributed": {"get_sp_ring_group": None, "get_sp_ulysses_group": None},
        "specforge.utils": {"print_with_rank": lambda _: None},
    }
    with mock.patch.object(torch, "compile", lambda *function, **_: function[0] if function else lambda one: one):
        (module,) = borrow(root, "specforge.modeling.draft.llama3_eagle", stand_ins=stand_ins)

    def read(place: Path, around: Target, _: bool) -> list[Tensor]:
        # Its own loading, `from_pretrained`, leaves its tables of angles without numbers under transformers 5.23.
        network = module.LlamaForCausalLMEagle3(module.LlamaConfig.from_pretrained(place))
        if network.target_hidden_size == network.config.hidden_size:
            network.load_embedding(str(around.directory))
        network.load_state_dict(torch.load(place / "pytorch_model.bin", weights_only=True), strict=False)
        features, tokens = _texts(around, 3)
        hidden = network.eval()(features[:, :-1], network.embed_input_ids(tokens[:, 1:]))
        return [network.lm_head(hidden)]

    yield from _outcomes(SPECFORGE, [case for case in _CASES if case[1]], read, target, work)


def sglang(root: Path, target: Target, work: Path) -> Iterator[Outcome]:
    """Every case in SGLang; see `forward`."""
    with _process(SGLANG, "sglang", root, work) as read:
        yield from _outcomes(SGLANG, _CASES, read, target, work)
        if target.given is None:
            yield _without_bias_entry(read, work)


def vllm(root: Path, target: Target, work: Path) -> Iterator[Outcome]:
    """Every case in vLLM; see `forward`."""
    with _process(VLLM_EAGLE, "vllm", root, work) as read:
        yield from _outcomes(VLLM_EAGLE, _CASES, read, target, work)


@contextmanager
def _process(program: str, kind: str, root: Path, work: Path) -> Iterator[Read]:
    """What asks a process of `forward`: logits of the head that lies at a place."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(root))))
    environment = {**os.environ, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"}
    work.mkdir(exist_ok=True)
    log = work / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.forward", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, text=True, env=environment, cwd=Path(__file__).parents[2],
        ) as process,
    ):  # fmt: skip
        questions, answers = process.stdin, process.stdout
        assert questions is not None, "a pipe"
        assert answers is not None, "a pipe"
        if not answers.readline():
            raise UnusableError(f"{program} does not run here: {log.read_text().strip().splitlines()[-1]}")

        def read(place: Path, around: Target, is_eagle3: bool) -> list[Tensor]:
            features, tokens = _texts(around, len(_boundaries(place)) if is_eagle3 else 1)
            weights = _weights(place)
            given = {"features": features[:, :-1].contiguous(), "tokens": tokens[:, 1:].contiguous(),
                     "embedding": _embedding(around), "weights": weights}  # fmt: skip
            torch.save(given, place / "inputs.pt")
            question = {"place": str(place), "is_eagle3": is_eagle3, "inputs": str(place / "inputs.pt"),
                        "num_layers": around.target_info.num_layers, "output": str(place / "outputs.pt")}  # fmt: skip
            print(json.dumps(question), file=questions, flush=True)
            if reason := json.loads(answers.readline()):
                raise RuntimeError(reason)
            found = torch.load(place / "outputs.pt", weights_only=True)
            if not is_eagle3:
                return [around.parts.lm_head(found["outputs"])]
            if found.get("boundaries", _boundaries(place)) != _boundaries(place):
                raise RuntimeError(f"it reads the boundaries {found['boundaries']}")
            num_drafted = len(weights["lm_head.weight"])
            if found["token_map"] is not None:
                expected = weights["d2t"] + torch.arange(num_drafted)
                if not torch.equal(found["token_map"], expected):
                    raise RuntimeError("it drafts other tokens")
            return [found["outputs"][..., :num_drafted]]

        yield read
        questions.close()


def _weights(place: Path) -> dict[str, Tensor]:
    pickle = place / "pytorch_model.bin"
    return torch.load(pickle, weights_only=True) if pickle.exists() else load_file(place / "model.safetensors")


def _embedding(around: Target) -> Tensor:
    return around.parts.embed(torch.arange(around.parts.lm_head_weight.shape[0])).detach()


def _without_bias_entry(read: Read, work: Path) -> Outcome:
    """SGLang beside an EAGLE-1 head with the change that foretoken advises."""
    around, place = Target.made(work / "target", num_layers=_LAYERS), work / "no entry"
    config = EagleConfig(hidden_size=E, vocab_size=V, layer=_LAYER, has_bias=True)
    back, _ = written("eagle", random_head(config, around), around, place)
    stated = json.loads((place / "config.json").read_text())
    del stated["bias"]
    (place / "config.json").write_text(json.dumps(stated))
    return compared(
        SGLANG, "EAGLE-1, a bias, 'bias' removed from config.json, eagle", claimed=True, ours=_ours(back, around),
        theirs=partial(torch.no_grad()(read), place, around, False),
    )  # fmt: skip


def _boundaries(place: Path) -> list[int]:
    """The taps of a file's EAGLE-3 head."""
    stated = json.loads((place / "config.json").read_text())
    if "eagle_config" in stated:  # as SpecForge counts
        return [one + 1 for one in stated["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    return list(stated["eagle_aux_hidden_state_layer_ids"])


def _outcomes(program: str, cases: Any, read: Read, target: Target, work: Path) -> Iterator[Outcome]:
    """Every case of some, or of the given head every file that foretoken says something of for this program."""
    if target.given is not None:
        method = target.given.checkpoint.config.method
        for name, back, claimed in given_files(_FORMATS.get(method, ()), program, target, work):
            yield compared(
                program, f"{target.given.name}, {name}", claimed=claimed, ours=_ours(back, target),
                theirs=partial(torch.no_grad()(read), work / name, target, method == "eagle3"),
            )  # fmt: skip
        return
    around = Target.made(work / "target", num_layers=_LAYERS)
    for index, (case, is_eagle3, changes, of_block) in enumerate(cases):
        sizes = {"hidden_size": E, "vocab_size": V, "layer": _LAYER.model_copy(update=of_block), **changes}
        of_three = {"boundaries": (2, 6, 9), "draft_vocab_size": _VD}
        config = Eagle3Config(**{**of_three, **sizes}) if is_eagle3 else EagleConfig(**sizes)
        name, place = "eagle3" if is_eagle3 else "eagle", work / str(index)
        back, readers = written(name, random_head(config, around), around, place)
        claimed = readers[program].reads
        yield compared(
            program, f"{case}, {name}", claimed=claimed, ours=_ours(back, around),
            theirs=partial(torch.no_grad()(read), place, around, is_eagle3),
        )  # fmt: skip


def _texts(around: Target, num_taps: int) -> tuple[Tensor, Tensor]:
    """(B, S, F E) features and (B, S) tokens."""
    if around.given is not None:
        return around.given.features, around.given.tokens
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(BATCH, LENGTH, num_taps * E, generator=generator)
    return features, torch.randint(V, (BATCH, LENGTH), generator=generator)


@torch.no_grad()
def _ours(head: HeadCheckpoint, target: Target) -> list[Tensor]:
    """(B, S - 1, Vd) of the first step."""
    config: Any = head.config
    features, tokens = _texts(target, len(config.taps))
    module = head.module()
    hidden = next(iter(module.teacher_forced(features, tokens, target.parts)))
    return [module.draft_logits(0, hidden, target.parts)[:, :-1]]
