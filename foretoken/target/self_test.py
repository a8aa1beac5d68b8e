"""Proof at load that a model really attends as a tree demands.

Some architectures only warn that they ignore the attention plug-in and then give wrong logits, so every model runs a
small branching tree through the cache and is compared with ordinary forwards of each path.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import ModelError
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.target.plain import run_plain
from foretoken.target.plugin import current_pass
from foretoken.target.slot_cache import LayerShape

if TYPE_CHECKING:
    from foretoken.target.runner import Runner

_PROMPT_LEN = 3
_PARENTS = (-1, 0, 0, 1, 2, 2)  # two branches, one of which forks
NUM_ROWS = _PROMPT_LEN + len(_PARENTS)  # cache rows that the self-test needs


def probe_layer_shapes(model: nn.Module) -> list[LayerShape]:
    """Sizes of every layer's keys and values, read off the cache that an ordinary forward makes.

    Raises:
        ModelError: When some layer keeps anything else than keys and values.
    """
    output = run_plain(model, torch.zeros(1, 2, dtype=torch.int64), use_cache=True)
    layers = getattr(getattr(output, "past_key_values", None), "layers", None)
    if not layers:
        raise ModelError(
            f"{type(model).__name__} keeps no keys and values between passes, or keeps them in a way of its own. "
            "Expected a causal LM with a KV cache. It cannot be used as a target."
        )
    shapes = []
    for index, layer in enumerate(layers):
        key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(key, Tensor) or not isinstance(value, Tensor):
            raise ModelError(
                f"layer {index} of {type(model).__name__} keeps {type(layer).__name__} instead of keys and values, "
                "which cannot be rolled back after a rejected draft. Use a model with attention in every layer."
            )
        shapes.append(LayerShape(key.shape[1], key.shape[3], value.shape[3]))
    return shapes


def check_tree_attention(runner: Runner) -> None:
    """Compares a small tree with its paths; uses the first rows of slot 0.

    Raises:
        ModelError: When the logits differ by more than rounding, or sliding windows are lost on the way.
    """
    # Measured on tiny random models: float32 reaches 4e-6, bfloat16 5e-2; a lost mask gives 1e-3 at the very least in
    # float32 (weights of scale 0.02) and 0.2 on the trained models here. In the narrow dtypes rounding may also send
    # one token of a mixture of experts to another expert (errors up to 0.7), but hardly with three sets of tokens.
    is_wide = runner.model.dtype in (torch.float32, torch.float64)
    tolerance, attempts = (2e-4, 1) if is_wide else (5e-2, 3)
    worst = math.inf
    for attempt in range(attempts):
        worst = min(worst, _worst_error(runner, first_token=3 + 11 * attempt))
        if worst <= tolerance:
            break
    else:
        raise ModelError(
            f"{type(runner.model.module).__name__} gives wrong logits for a token tree (relative error {worst:.1e}, "
            f"expected at most {tolerance:.0e}): it ignores the attention plug-in or keeps state outside the KV cache. "
            "It cannot be used as a target."
        )
    if runner.name == "generic":  # the others read windows from the configuration themselves
        _check_windows(runner)


def _worst_error(runner: Runner, first_token: int) -> float:
    """Greatest relative error of a node's logits against an ordinary forward of its path.

    Raises:
        ModelError: When some logits are not numbers.
    """
    module, vocab = runner.model.module, runner.vocab_size
    tokens = [(7 * i + first_token) % vocab for i in range(NUM_ROWS)]
    prompt, nodes = tokens[: min(_PROMPT_LEN, runner.context_len)], tokens[_PROMPT_LEN:]
    tree = TokenTree.from_rows([TreeRow(nodes, _PARENTS)], device=runner.device)
    ours = _tree_logits(runner, prompt, tree)
    errors = []
    for node in range(len(nodes)):
        path = tree.path_tokens(torch.tensor([node], device=runner.device))[0]
        ids = [*prompt, nodes[0], *(t for t in path.tolist() if t >= 0)]
        theirs = _comparable(run_plain(module, torch.tensor([ids])).logits[0, -1].float())
        errors.append((ours[node] - theirs).norm() / theirs.norm().clamp_min(1e-9))
    worst = float(torch.stack(errors).max())  # NaN where any is, unlike Python's max
    if math.isnan(worst):
        raise ModelError(
            f"{type(module).__name__} gives logits that are not numbers in {runner.model.dtype}. Expected finite "
            "logits. Its weights are damaged, or the dtype is too narrow for it: load it in float32."
        )
    return worst


def _tree_logits(runner: Runner, prompt: list[int], tree: TokenTree) -> Tensor:
    """(N, V) logits of a tree after a prompt, or a `ModelError` where the model cannot even run on our cache."""
    try:
        runner.prefill(0, prompt, 0)
        return _comparable(runner.verify([0], [len(prompt)], tree).logits[0])
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as err:
        raise ModelError(
            f"{type(runner.model.module).__name__} cannot run on a slot cache ({str(err).splitlines()[0]}): it ignores "
            "the attention plug-in. It cannot be used as a target."
        ) from err


def _comparable(logits: Tensor) -> Tensor:
    """Logits without the entries, -inf or nearly, by which a model forbids tokens: their norm would hide all others."""
    return logits.masked_fill(logits < -1e4, 0.0)


def _check_windows(runner: Runner) -> None:
    """Every layer that the configuration calls sliding must hand its window to attention.

    The tree above is shorter than any real window, so a lost one does not show in its logits.
    """
    config: Any = runner.model.config
    seen: dict[int, int | None] = {}

    def watch(*_: Any) -> None:
        forward_pass = current_pass()
        if forward_pass is not None:
            seen.update(forward_pass.windows)

    handle = runner.model.module.register_forward_hook(watch)
    try:
        runner.verify([0], [0], TokenTree.roots([0], device=runner.device))
    finally:
        handle.remove()
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        lost = [i for i, kind in enumerate(layer_types) if kind == "sliding_attention" and seen.get(i) is None]
    else:
        # Without layer types a window is meant for every layer, or is switched off by `use_sliding_window`.
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        is_lost = window is not None and window < runner.context_len and not any(seen.values())
        lost = list(seen) if is_lost else []
    if lost:
        raise ModelError(
            f"layers {lost} of {type(runner.model.module).__name__} slide a window but do not say which to the "
            "attention function. It cannot be used as a target."
        )
