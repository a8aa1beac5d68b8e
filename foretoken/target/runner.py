"""The generic runner: any Hugging Face causal LM, unmodified, as a target or as a draft model.

It offers what the engine needs (prefill, verify a tree, commit a path) and the general pass below them, which draft
models use to grow a tree level by level. Cache lengths belong to the caller.

Letters: B sequences, T tokens fed, N tree nodes, V vocabulary, D hidden size, F taps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.attention.layout import AttentionLayout
from foretoken.core.errors import ModelError, RequestError
from foretoken.core.token_tree import MAX_NODES, TokenTree
from foretoken.target.memory import affordable_rows
from foretoken.target.plugin import ForwardPass, as_transformers_cache, running
from foretoken.target.self_test import NUM_ROWS, check_tree_attention, probe_layer_shapes
from foretoken.target.slot_cache import SlotCache
from foretoken.target.taps import Tap, Taps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.target.loading import LoadedModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOutput:
    """What a pass gives back.

    Attributes:
        logits: (B, T, V) float32.
        features: (B, T, F, D) in the model's dtype, tapped features in the order asked for, or None without taps.
    """

    logits: Tensor
    features: Tensor | None


class GenericRunner:
    """Runs a transformers model over preallocated KV slots.

    Attributes:
        name: "generic", named in reports.
        model: What was loaded, with its configuration facts.
        cache: KV rows by slot.
    """

    name = "generic"

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_slots: int,
        context_len: int | None = None,
        max_nodes: int = 64,
        taps: Sequence[Tap] = (),
        prefill_chunk: int = 512,
    ) -> None:
        """Allocates the cache and proves on the model itself that trees are attended to correctly.

        Args:
            model: A loaded causal LM.
            num_slots: Sequences held at once.
            context_len: Most tokens a sequence may reach; the model's own limit when None. Cut, with a warning, to what
                half of the free memory holds.
            max_nodes: Widest tree, root included.
            taps: Features to read, see `foretoken.target.taps`.
            prefill_chunk: Prompt tokens fed per pass.

        Raises:
            ModelError: When the model ignores the attention plug-in, a tap cannot be read, or there is no memory.
        """
        self.model = model
        self.max_nodes = min(max_nodes, MAX_NODES)
        self.prefill_chunk = prefill_chunk
        shapes = probe_layer_shapes(model.module)
        rows = affordable_rows(shapes, num_slots=num_slots, dtype=model.dtype, device=model.device)
        wanted = min(context_len or model.context_len, model.context_len)
        self.context_len = min(wanted, rows - self.max_nodes)
        if self.context_len < min(wanted, NUM_ROWS):
            raise ModelError(f"there is no memory for the KV cache of '{model.name}'. Lower max_num_seqs.")
        if self.context_len < wanted:
            _log.warning(
                "%s: KV rows for %d sequences of %d tokens do not fit into half of the free memory; the context is cut "
                "to %d. Lower max_num_seqs for longer ones.", model.name, num_slots, wanted, self.context_len,
            )  # fmt: skip
        self.cache = SlotCache(
            shapes,
            num_slots=num_slots,
            capacity=max(self.context_len + self.max_nodes, NUM_ROWS),
            dtype=model.dtype,
            device=model.device,
        )
        self._transformers_cache = as_transformers_cache(self.cache)
        self._taps = tuple(taps)
        if taps:
            Taps(model.module, model.num_layers, taps)
        check_tree_attention(self)

    @property
    def device(self) -> torch.device:
        """Where inputs go and outputs come from."""
        return self.model.device

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        return self.model.vocab_size

    def prefill(self, slot: int, tokens: Sequence[int], start: int) -> Tensor | None:
        """Feeds prompt tokens of one sequence, at most `prefill_chunk` of them, without computing logits.

        Args:
            slot: Which sequence.
            tokens: Tokens at positions start, start + 1, …
            start: Rows of the slot already filled.

        Returns:
            (1, T, F, D) tapped features, or None without taps.

        Raises:
            RequestError: When the prompt does not fit.
        """
        end = start + len(tokens)
        if end > self.context_len:
            raise RequestError(f"{end} tokens do not fit. Expected at most {self.context_len}. Shorten the prompt.")
        positions = torch.arange(start, end, device=self.device).unsqueeze(0)
        layout = AttentionLayout(slots=[slot], prefix=[start], positions=positions)
        ids = torch.tensor([list(tokens)], device=self.device)
        with torch.inference_mode(), running(ForwardPass(layout=layout, starts=[start])) as forward_pass:
            self.model.backbone(**self._arguments(ids, positions))
        return self._stacked(forward_pass)

    def forward(self, tokens: Tensor, layout: AttentionLayout) -> PassOutput:
        """One pass over new tokens of several sequences; writes their rows after prefix and scratch rows.

        Args:
            tokens: (B, T) int64.
            layout: Positions, slots and who sees what.
        """
        starts = [prefix + layout.offset for prefix in layout.prefix]
        assert max(starts) + tokens.shape[1] <= self.cache.capacity, "a pass must fit behind the committed rows"
        with torch.inference_mode(), running(ForwardPass(layout=layout, starts=starts)) as forward_pass:
            output = self.model.module(**self._arguments(tokens, layout.positions))
        return PassOutput(logits=output.logits.float(), features=self._stacked(forward_pass))

    def verify(self, slots: Sequence[int], lengths: Sequence[int], tree: TokenTree) -> PassOutput:
        """Target logits at every node of a tree, in one pass. Committed rows stay untouched.

        Args:
            slots: B slots.
            lengths: Committed KV rows of each: the root goes to position `lengths[b]`.
            tree: (B, N) candidates.
        """
        prefix = torch.tensor(lengths, device=self.device).unsqueeze(1)
        # Nodes past the context limit are never accepted; their positions only have to be legal.
        positions = (prefix + tree.depths).clamp_max(self.model.context_len - 1)
        visible = tree.ancestor_mask() if tree.width > 1 else None
        layout = AttentionLayout(
            slots=slots, prefix=lengths, positions=positions, visible=visible, scratch_positions=positions
        )
        return self.forward(tree.tokens, layout)

    def commit(self, slot: int, length: int, path: Sequence[int]) -> None:
        """Makes the accepted path's rows permanent: root and path follow the committed rows.

        Args:
            slot: Which sequence.
            length: Its committed rows before this iteration; the root's row is `length`.
            path: Accepted nodes in order, without the root.
        """
        if path:
            self.cache.move_rows(slot, [length + node for node in path], length + 1)

    def _arguments(self, tokens: Tensor, positions: Tensor) -> dict[str, Any]:
        """Arguments of the model's forward."""
        return {
            "input_ids": tokens,
            "position_ids": positions,
            "past_key_values": self._transformers_cache,
            "use_cache": True,
        }

    def _stacked(self, forward_pass: ForwardPass) -> Tensor | None:
        """(B, T, F, D) features of a finished pass, or None without taps."""
        if not self._taps:
            return None
        return torch.stack([forward_pass.features[tap] for tap in self._taps], dim=2)
