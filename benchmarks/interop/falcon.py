"""Runs Falcon's network, trees and training loss beside ours.

The network is borrowed as it is. Its LSTM hands on its state too, which stops it: with that left out it runs. Trees are
drafted over several rounds by its own functions. The script that trains does so when it is imported, so the statements
of one training step are taken out of its syntax tree and run around a stand-in for its data loader.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

from benchmarks.interop.borrowed import UnusableError, borrow
from benchmarks.interop.outcome import Outcome, compared
from benchmarks.interop.samples import E, H, Target, V, drafting_handle, greedy_context, random_head, texts, written
from foretoken import SamplingParams
from foretoken.drafters.base import Committed, DraftRequest
from foretoken.drafters.falcon import FalconDrafter
from foretoken.drafters.head_drafter import HeadOptions
from foretoken.formats.conversion import FALCON_CODE
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.falcon import FalconConfig
from foretoken.models.loading import load_model
from foretoken.training.objective_base import Examples, accumulate, label_counts
from foretoken.training.objectives import FalconObjective
from foretoken.trees.choices import TreeShape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from foretoken.formats.checkpoint import HeadCheckpoint

_LAYER = LayerConfig(num_attention_heads=H, num_key_value_heads=2, head_dim=E // H, intermediate_size=24)
_EPOCH, _NUM_EPOCHS, _SEED = 5, 20, 5  # a quarter of the training is over


def outcomes(root: Path, target: Target, work: Path) -> Iterator[Outcome]:
    """The network as released and mended, trees and losses of the mended one."""
    official = _Official(*borrow(root, "models.cnets", "models.configs", "models.utils", "models.choices"))
    for block, has_bias, is_mended in ((2, True, False), (2, True, True), (3, True, True), (2, False, True)):
        head, place, claimed = _written(block, has_bias, target, work / f"{block}-{has_bias}-{is_mended}")
        features, tokens = texts()
        module: Any = head.module()
        with torch.no_grad():
            ours = module.block_outputs(features[:1, :-1], target.parts.embed(tokens[:1, 1:]))
        how = "with its LSTM's state left out" if is_mended else "as released"
        yield compared(
            FALCON_CODE, f"blocks of {block}, {'a' if has_bias else 'no'} bias, {how}",
            claimed=True if is_mended else claimed, ours=[ours],
            theirs=partial(_outputs, official, place, is_mended=is_mended),
        )  # fmt: skip
    yield from _trees(official, target, work)
    yield from _losses(official, root / "train" / "glance.py", target, work)


class _Official(NamedTuple):
    """Their modules."""

    network: Any
    configs: Any
    utils: Any
    choices: Any

    def model(self, place: Path, *, is_mended: bool = True) -> Any:
        """Their network with the weights of a file."""
        stated = json.loads((place / "config.json").read_text())
        config = self.configs.FConfig.from_pretrained(str(place / "config.json"))
        for key in ("rope_scaling", "rope_theta"):  # which transformers 5 rewrites
            object.__setattr__(config, key, stated[key])
        model = self.network.Model(config, bias=stated["bias"]).eval()
        model.load_state_dict(torch.load(place / "pytorch_model.bin", weights_only=True), strict=False)
        if is_mended:
            forward = model.lstm.forward
            model.lstm.forward = lambda inputs: forward(inputs)[0]
        return model


def _written(block: int, has_bias: bool, target: Target, place: Path) -> tuple[HeadCheckpoint, Path, bool]:
    """A random head, where it lies, and whether foretoken says that the original reads it."""
    config = FalconConfig(hidden_size=E, vocab_size=V, layer=_LAYER, block=block, num_steps=4 * block,
                          has_bias=has_bias, lstm_mode="per_position", dropout=0.0)  # fmt: skip
    back, readers = written("falcon", random_head(config, target), target, place)
    return back, place, readers[FALCON_CODE].reads


@torch.no_grad()
def _outputs(official: _Official, place: Path, *, is_mended: bool) -> list[Tensor]:
    """(1, S - 1, E) of the original network, whose LSTM takes the texts of a batch for its steps."""
    features, tokens = texts()
    return [official.model(place, is_mended=is_mended)(features[:1, :-1], input_ids=tokens[:1, 1:])]


def _trees(official: _Official, target: Target, work: Path) -> Iterator[Outcome]:
    """Tokens and ancestors of every node, over several rounds."""
    published = official.choices
    for block, name, ranks in (
        (2, "its tree of 4 levels", published.kmask2_4layer_tree),
        (2, "its last tree of 8 levels", published.kmask2_8layer_tree_7),
        (3, "a tree of 6 levels", TreeShape.cartesian([3, 1, 2, 2, 1, 2]).choices),
    ):
        choices = [list(each) for each in ranks]
        _, place, _ = _written(block, True, target, work / f"tree-{block}-{len(choices)}")
        ends = _ends(block)
        yield compared(
            FALCON_CODE, f"blocks of {block}, {name}: {len(choices)} nodes in each of {len(ends)} drafts", claimed=True,
            ours=_our_trees(place, choices, target, ends),
            theirs=partial(_their_trees, official, place, choices, target, ends),
        )  # fmt: skip


def _ends(block: int) -> list[int]:
    """Committed positions at each draft: the original reads one new position, or as many as make whole blocks."""
    return [12, 13, 13 + block, 13 + 3 * block, 14 + 3 * block, 14 + 5 * block]


def _long_text(length: int) -> tuple[Tensor, Tensor]:
    """(1, S, E) features and (1, S + 1) tokens."""
    generator = torch.Generator().manual_seed(11)
    features = torch.randn(1, length, E, generator=generator)
    return features, torch.randint(V, (1, length + 1), generator=generator)


@torch.no_grad()
def _their_trees(
    official: _Official, place: Path, choices: list[list[int]], target: Target, ends: list[int]
) -> list[Tensor]:
    """(R, N - 1) tokens below the root, and (N - 1, N - 1) which node sees which."""
    model, (features, tokens) = official.model(place), _long_text(ends[-1])
    block = model.config.k_mask
    model.tree_choice, model.diff_device = choices, False
    model.init_tree()
    buffers, drafted = official.utils.generate_tree_buffers(choices, "cpu", block), []
    for begin, end in pairwise((0, *ends)):
        # As `update_inference_inputs` does: fewer new positions than a block come behind K - 1 known ones.
        first = begin - (block - 1) if begin and end - begin < block else begin
        said = model.topK_genrate(
            features[:, first:end], tokens[:, : end + 1], target.parts.lm_head, None, k_mask=block,
            accept_length=end - begin - 1,
        )  # fmt: skip
        committed = tokens[:, end + 1 - block : end + 1]
        tree = official.utils.generate_candidates(
            said, buffers["tree_indices"], buffers["retrieve_indices"], committed, None, block
        )[2]
        drafted.append(tree[0, block:])
    return [torch.stack(drafted), buffers["tree_attn_mask"][0, 0, block:, block:]]


def _our_trees(place: Path, choices: list[list[int]], target: Target, ends: list[int]) -> list[Tensor]:
    """The same of the drafter, called as the engine calls it."""
    options: dict[str, Any] = {
        "method": "falcon",
        "model": str(place),
        "tree": choices,
        "quantization": "none",
        "max_nodes": 512,
    }
    model = load_model(target.directory, dtype="float32", device="cpu")
    drafter = FalconDrafter(HeadOptions(**options), model)
    drafter.attach(drafting_handle(model))
    features, tokens = _long_text(ends[-1])
    text = tokens[0].tolist()
    drafter.begin(0, DraftRequest(request_id="0", prompt=text[: ends[0]], params=SamplingParams()))
    drafted = []
    for begin, end in pairwise((0, *ends)):
        rows = features[0, begin:end].unsqueeze(1)
        drafter.commit(Committed(slots=[0], starts=[begin], tokens=[text[begin:end]], features=rows))
        tree = drafter.propose(greedy_context(text[: end + 1]))
        drafted.append(tree.tokens[0, 1:])
    sees = torch.eye(tree.width)
    for node, parent in enumerate(tree.parents[0].tolist()):
        if parent > 0:
            sees[node] += sees[parent]
    return [torch.stack(drafted), sees[1:, 1:]]


def _losses(official: _Official, script: Path, target: Target, work: Path) -> Iterator[Outcome]:
    """Loss and gradients of one training step. Theirs is a mean over rows; ours adds up the K rows of a block."""
    if not script.is_file():
        raise UnusableError(f"'{script}' is missing")
    for block in (2, 3):
        head, place, _ = _written(block, True, target, work / f"loss-{block}")
        yield compared(
            FALCON_CODE, f"blocks of {block}, loss and gradients of a training step: theirs times {block}",
            claimed=True, ours=_our_step(head, target, block),
            theirs=partial(_their_step, script, official.model(place), target, block),
        )  # fmt: skip


def _text_to_learn(block: int) -> tuple[Tensor, Tensor, Tensor]:
    """(1, S, E) features, (1, S) tokens and (1, S) bool, which tokens are labels: none that no row predicts."""
    features, tokens = _long_text(28)
    supervised = torch.rand(1, 28, generator=torch.Generator().manual_seed(2)) < 0.8
    supervised[:, : block + 1] = False
    return features, tokens[:, :28], supervised


def _our_step(head: HeadCheckpoint, target: Target, block: int) -> list[Tensor]:
    """The loss, and the gradients of the LSTM and the decoder block."""
    objective = FalconObjective(noise=0.0, glancing=0.35, glancing_floor=0.1)
    module = head.module().eval().requires_grad_()
    features, tokens, supervised = _text_to_learn(block)
    counts = label_counts(supervised, block)
    torch.manual_seed(_SEED)
    given = Examples(tokens, supervised, features, features, _EPOCH / _NUM_EPOCHS)
    sums = accumulate(objective, module, given, target.parts, counts=counts)
    return [(sums.loss / counts).sum().float(), *_gradients(module)]


def _their_step(script: Path, model: Any, target: Target, block: int) -> list[Tensor]:
    """The same of `train/glance.py`, times K.

    Its arguments, data classes and the turn of its loop are taken out of its syntax tree. Three of its choices are
    replaced: labels are the text's where it draws them from the target, its divergence has a temperature of 1, and
    its random numbers are those that ours draws.
    """
    features, tokens, supervised = _text_to_learn(block)
    is_learned = torch.cat([supervised[0, block + 1 :], torch.zeros(block + 1, dtype=torch.bool)])
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.pt"
        torch.save({"hidden_state": features[0], "input_ids": tokens[0], "loss_mask": is_learned.long()}, text)
        names = _script_names(script, model, target, block)
        item = names["CustomDataset"]([text], k_mask=block)[0]
    names["train_loader"] = [names["DataCollatorWithPadding"]()([item])]
    labels = names["train_loader"][0]["input_ids_target"]
    names["F"] = SimpleNamespace(gumbel_softmax=lambda *_, **__: torch.nn.functional.one_hot(labels, V))
    torch.manual_seed(_SEED)
    exec(names.pop("turn"), names)
    return [block * each for each in (names["loss"].detach(), *_gradients(model))]


def _script_names(script: Path, model: Any, target: Target, block: int) -> dict[str, Any]:
    """What a turn of the loop reads, with the code of the turn itself as `turn`."""
    body = ast.parse(script.read_text(encoding="utf-8")).body
    turn = next(
        inner for outer in body if isinstance(outer, ast.For) for inner in outer.body if isinstance(inner, ast.For)
    )
    turn.body = turn.body[: 1 + next(i for i, each in enumerate(turn.body) if isinstance(each, ast.With))]
    wanted = ("argparse", "parser", "args", "train_config", "criterion", "CustomDataset", "DataCollatorWithPadding")
    kept = [each for each in body if _names(each) & {*wanted}]

    def drawn(rows: list[int], count: int) -> list[int]:
        # With K above 2 it leaves out the last of the rows that ours draws from.
        return [rows[place] for place in torch.randperm(len(rows) + (block > 2))[:count].tolist()]

    def nothing(*_: Any) -> None: ...

    names: dict[str, Any] = {
        "Dataset": object, "Any": Any, "Dict": dict, "List": list, "torch": torch, "nn": torch.nn, "tqdm": iter,
        "random": SimpleNamespace(sample=drawn),
        "secrets": SimpleNamespace(randbelow=lambda below: int(torch.randint(below, ()))),
        "accelerator": SimpleNamespace(
            accumulate=nullcontext, backward=torch.Tensor.backward, clip_grad_value_=nothing
        ),
        "optimizer": SimpleNamespace(zero_grad=model.zero_grad, step=nothing), "is_warmup": False,
        "model": model, "head": target.parts.lm_head, "embed_tokens": model.embed_tokens, "k_mask": block,
        "epoch": _EPOCH, "num_epochs": _NUM_EPOCHS, "num_replace_min": 1 << 30, "T": 1.0,
    }  # fmt: skip
    with mock.patch.object(sys, "argv", [script.name]):
        exec(_compiled(kept, script), names)
    return {**names, "turn": _compiled([turn], script)}


def _names(statement: ast.stmt) -> set[str]:
    """What a statement is about, by its outermost names."""
    match statement:
        case ast.Import(names=names):
            return {each.name for each in names}
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.ClassDef(name=name):
            return {name}
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return {name}
    return set()


def _compiled(statements: list[ast.stmt], script: Path) -> Any:
    """Statements of a script as code."""
    return compile(ast.Module(statements, type_ignores=[]), script, "exec", dont_inherit=True)


def _gradients(module: Any) -> list[Tensor]:
    """By names that are the same in both programs."""
    found = {
        name.removesuffix(".weight").split(".")[-1].replace("layernorm", "norm"): weight.grad
        for name, weight in module.named_parameters()
        if weight.requires_grad
    }
    return [grad for _, grad in sorted(found.items(), key=itemgetter(0))]
