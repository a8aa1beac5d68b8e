"""The slow, obvious target: ordinary forwards of whole sequences with transformers' eager attention, no cache."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Relative error of logits between one tree pass over a cache and a forward of the whole path, same float32 weights:
# both round to 24 bits at every step, over 3 layers and sums of at most 100 terms. at most 2e-6 is measured; a wrong
# mask, position or row gives 1e-2 and more (see the controls).
FLOAT32_TOLERANCE = 2e-5


class PlainModel:
    """A transformers causal LM that shares nothing with the runner but its weights."""

    def __init__(self, module: Any) -> None:
        module.set_attn_implementation("eager")
        self.module = module

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        """(T, V) logits at every position of one sequence, float32."""
        return self.batch([tokens])[0]

    def batch(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """(T, V) logits of every text from one forward, float32. Shorter texts are padded behind, where none looks."""
        rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(list(text)) for text in texts], batch_first=True)
        return [row[: len(text)].float() for row, text in zip(self._run(rows).logits, texts, strict=True)]

    def hidden_states(self, tokens: Sequence[int]) -> tuple[Tensor, ...]:
        """L + 1 tensors (T, D) as the model reports them; the last one is after the final norm."""
        return tuple(state[0] for state in self._run(torch.tensor([tokens]), output_hidden_states=True).hidden_states)

    def final_norm_input(self, tokens: Sequence[int]) -> Tensor:
        """(T, D), what the last block gives to the norm after it."""
        norms = [
            module
            for name, module in self.module.named_modules()
            if name.split(".")[-1] in ("norm", "ln_f", "final_layernorm", "final_layer_norm") and "layers." not in name
        ]
        assert len(norms) == 1
        seen: list[Tensor] = []
        handle = norms[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        try:
            self._run(torch.tensor([tokens]))
        finally:
            handle.remove()
        return seen[0][0]

    def _run(self, tokens: Tensor, **options: Any) -> Any:
        with torch.inference_mode():
            return self.module(tokens, use_cache=False, **options)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Greatest relative error over rows of the last dimension."""
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())
