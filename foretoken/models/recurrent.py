"""Runs the recurrent layers of transformers models over token trees, one level of the tree at a time.

Transformers' mixers (Gated DeltaNet, Mamba, Mamba2, short convolutions) read a batch of texts, one token each, from the
states in a cache. All nodes of a level are such a batch: each begins with its parent's state. So the model's own code
computes every token, and a tree costs as many calls of a mixer as it is deep. Prompts are read token by token too:
Mamba's mixers begin again from zero when several tokens follow a state.

Forwards over several tokens clamp the time steps of Mamba2, single tokens do not. The clamp is taken away: a text must
not depend on how many tokens a pass has.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from foretoken.decoder.recurrent_states import LayerState
from foretoken.models.borrowed import is_adapted
from foretoken.models.forward_pass import current_pass


def adapt_recurrent_layers(model: nn.Module) -> bool:
    """Replaces `forward` of the recurrent mixers of a model in place; returns whether there is any.

    Outside our passes they compute as before.
    """
    mixers: list[Any] = [module for module in model.modules() if _is_mixer(module)]
    for mixer in mixers:
        if is_adapted(mixer):  # the model was wrapped before
            continue
        mixer.forward = partial(_forward, mixer, mixer.forward)
        if hasattr(mixer, "time_step_limit"):
            mixer.time_step_limit = (0.0, float("inf"))
    return bool(mixers)


def _is_mixer(module: nn.Module) -> bool:
    has_window = any(isinstance(child, nn.Conv1d) for child in module.children())
    return has_window and isinstance(getattr(module, "layer_idx", None), int)


class RecurrentSizes(NamedTuple):
    """The recurrent layers of a model, and their bytes in memory.

    Attributes:
        layers: Recurrent layers.
        attention_layers: Layers with keys and values; blocks with both count twice.
        state_bytes: Of a sequence: states in float32.
        window_bytes: Of a sequence: inputs of convolutions, one less than their taps, in the model's dtype.
        node_bytes: Inputs of one token, which the native kernels store for each node of a tree.
    """

    layers: int
    attention_layers: int
    state_bytes: int
    window_bytes: int
    node_bytes: int


WITHOUT_KEYS = {"linear_attention", "conv", "mlp", "moe"}  # in `layer_types` of configurations


def recurrent_sizes(module: nn.Module, config: Any, itemsize: int) -> RecurrentSizes | None:
    """Returns the sizes of a model's recurrent layers; its weights may be on "meta". None if there are none.

    Args:
        config: Its text configuration.
        itemsize: Bytes of a number in the model's dtype.
    """
    mixers: list[Any] = [each for each in module.modules() if _is_mixer(each)]
    if not mixers:
        return None
    states = windows = nodes = 0
    for mixer in mixers:
        convolution = next(child for child in mixer.children() if isinstance(child, nn.Conv1d))
        channels, _, taps = convolution.weight.shape
        state, gates = _state_elements(mixer)
        states += state * torch.float32.itemsize
        windows += (taps - 1) * channels * itemsize
        nodes += channels * itemsize + gates * torch.float32.itemsize
    kinds = getattr(config, "layer_types", None) or ["linear_attention"] * config.num_hidden_layers
    return RecurrentSizes(len(mixers), sum(kind not in WITHOUT_KEYS for kind in kinds), states, windows, nodes)


def _state_elements(mixer: Any) -> tuple[int, int]:
    """Returns the numbers of a mixer's state, and its gates of a token."""
    if hasattr(mixer, "head_v_dim"):  # the gated delta rule
        return mixer.num_v_heads * mixer.head_k_dim * mixer.head_v_dim, 2 * mixer.num_v_heads
    if hasattr(mixer, "ssm_state_size"):  # Mamba2, and Mamba without heads
        return mixer.intermediate_size * mixer.ssm_state_size, getattr(mixer, "num_heads", 0)
    return 0, 0  # a convolution alone


def state_of(layer: Any) -> LayerState | None:
    """Returns zeros like the state in a layer of transformers' cache, without its batch; None for attention layers."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return None
    window, recurrent = layer.conv_states[0], layer.recurrent_states[0]
    assert window is not None, "the cache comes from a forward"
    return LayerState(torch.zeros_like(window[0]), None if recurrent is None else torch.zeros_like(recurrent[0]))


def _forward(mixer: Any, own: Callable[..., Tensor], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Computes (1, M, D) of a pass of ours level by level; other calls as the mixer itself."""
    forward_pass = current_pass()
    if forward_pass is None or forward_pass.states is None:
        return own(hidden_states, *args, **kwargs)
    name = "past_key_values" if "past_key_values" in kwargs else "cache_params"
    kwargs = {key: value for key, value in kwargs.items() if key not in {name, "attention_mask"}}
    states, layer = forward_pass.states, mixer.layer_idx
    outputs = torch.empty_like(hidden_states[0])
    state = states.before(layer)
    kept = states.kept.setdefault(layer, {})
    for number, level in enumerate(states.levels):
        tokens = _OneToken(state.take(level.parents))
        out = own(hidden_states[0, level.tokens].unsqueeze(1), **{name: tokens}, **kwargs)
        outputs[level.tokens] = out[:, 0]
        state = tokens.state
        if level.is_kept:
            kept[number] = state
    return outputs.unsqueeze(0)


class _OneToken:
    """The cache that a mixer sees: the state of each text, which the mixer replaces or changes in place."""

    def __init__(self, state: LayerState) -> None:
        self._window, self._recurrent = state

    @property
    def state(self) -> LayerState:
        return LayerState(self._window, self._recurrent)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:  # noqa: ARG002
        return self._window

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:  # noqa: ARG002
        return self._recurrent

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **kwargs: Any) -> Tensor:  # noqa: ARG002
        self._recurrent = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:  # noqa: ARG002
        return True
