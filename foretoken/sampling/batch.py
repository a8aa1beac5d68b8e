"""Sampling of a batch: parameters as tensors, temperature and truncation, and the target's distributions at tree nodes.

Top-down acceptance visits one node per sequence and depth, so processors run on accepted + 1 rows instead of all N.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.backend import runs_cpu_kernels
from foretoken.sampling.noise import KeyedNoise
from foretoken.sampling.processors import NodeView, apply_processors, build_processors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.sampling_params import SamplingParams
    from foretoken.core.token_tree import TokenTree
    from foretoken.sampling.processors import History, Processor


def warp(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns (B, V) float32 log-probabilities after temperature (1 for greedy requests) and truncation (-inf)."""
    logits = logits / batch.temperature
    if batch.top_k is not None:
        largest = logits.topk(batch.largest_top_k, dim=1).values
        logits = logits.masked_fill(logits < largest.gather(1, batch.top_k - 1), -inf)
    if batch.top_p is not None:
        logits = _within_mass(logits, batch.top_p)
    if batch.min_p is not None:
        logits = logits.masked_fill(logits < logits.amax(1, keepdim=True) + batch.min_p.log(), -inf)
    return logits.log_softmax(1)


_NUCLEUS = 1024  # most probable tokens that are sorted first, on CPUs; a choice: text rarely asks for more


def _within_mass(logits: Tensor, top_p: Tensor) -> Tensor:
    """Returns (R, V) logits without the tokens before which others have a probability of `top_p`, (R, 1), together.

    Of equal logits the first tokens stay. Whether all tokens of a row are sorted changes nothing in it.
    """
    total = logits.logsumexp(1, keepdim=True)
    if logits.shape[1] <= 2 * _NUCLEUS or not runs_cpu_kernels(logits.device):
        return _without_tail(logits, total, top_p, *logits.sort(dim=1, descending=True, stable=True))
    tokens = logits.topk(_NUCLEUS, dim=1, sorted=False).indices.sort(dim=1).values
    ranked, order = logits.gather(1, tokens).sort(dim=1, descending=True, stable=True)
    # The first token that is cut stands among these, and no token beyond them is its equal; or others are impossible.
    is_cut, last = _is_cut(ranked, total, top_p), ranked[:, -1:]
    first_cut = ranked.gather(1, is_cut.int().argmax(1, keepdim=True))
    is_known = (is_cut[:, -1:] & (first_cut > last)) | (last == -inf) | (top_p >= 1.0)
    kept = torch.full_like(logits, -inf).scatter(1, tokens.gather(1, order), ranked.masked_fill(is_cut, -inf))
    kept = torch.where(top_p < 1.0, kept, logits)
    if not is_known.all():
        rest = ~is_known[:, 0]
        rows = logits[rest]
        ranked, order = rows.sort(dim=1, descending=True, stable=True)
        kept[rest] = _without_tail(rows, total[rest], top_p[rest], ranked, order)
    return kept


def _without_tail(logits: Tensor, total: Tensor, top_p: Tensor, ranked: Tensor, order: Tensor) -> Tensor:
    is_cut = _is_cut(ranked, total, top_p)
    return logits.masked_fill(torch.zeros_like(is_cut).scatter(1, order, is_cut), -inf)


def _is_cut(ranked: Tensor, total: Tensor, top_p: Tensor) -> Tensor:
    probs = (ranked - total).exp()
    is_cut = (probs.cumsum(1) - probs >= top_p) & (top_p < 1.0)  # mass before the token
    is_cut[:, 0] = False  # also where float32 rounds top_p to 0
    return is_cut


def one_hot_log_probs(logits: Tensor) -> Tensor:
    """Returns (B, V) float32: 0 at the first largest logit, else -inf; -inf throughout without a finite logit."""
    best = best_possible(logits).unsqueeze(1)
    certain = torch.zeros_like(logits[:, :1]).masked_fill(best < 0, -inf)
    return torch.full_like(logits, -inf).scatter(1, best.clamp_min(0), certain)


def best_possible(scores: Tensor) -> Tensor:
    """Returns (B,) int64, the lowest index of the largest score of each row, or -1 if the row has no finite score.

    scores: (B, V) logits or noisy log-probabilities; -inf for impossible tokens. A NaN or +inf anywhere in a row makes
    the whole row impossible.
    """
    best = scores.max(1)
    return torch.where(best.values.isfinite(), best.indices, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """One request's sampling, resolved against its tokenizer.

    Attributes:
        seed: The request's own seed, or a drawn seed; an int64, as `derive_seed` returns.
        terminators: Token ids that `min_tokens` holds back: end-of-sequence and stop token ids.
    """

    params: SamplingParams
    seed: int
    terminators: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Parameters of B requests; a field is None if no request of the batch uses it.

    Attributes:
        greedy: (B,) bool.
        is_all_greedy: Host copy of `greedy.all()`.
        is_any_greedy: Host copy of `greedy.any()`.
        temperature: (B, 1) float32, 1 for greedy rows.
        top_k: (B, 1) int64, V if unlimited.
        largest_top_k: Upper bound of `top_k`, known on the host.
        top_p: (B, 1) float32.
        min_p: (B, 1) float32.
        processors: Applied before temperature and truncation, in order; each over the B rows.
    """

    noise: KeyedNoise
    vocab_size: int
    greedy: Tensor
    is_all_greedy: bool
    is_any_greedy: bool
    temperature: Tensor
    top_k: Tensor | None
    largest_top_k: int
    top_p: Tensor | None
    min_p: Tensor | None
    processors: tuple[Processor, ...]

    @property
    def inverse_temperature(self) -> Tensor:
        """(B,) float32, as `SamplingParams.inverse_temperature`: 0 for greedy rows."""
        return torch.where(self.greedy, 0.0, self.temperature[:, 0].reciprocal())

    @property
    def is_plain(self) -> bool:
        """Whether temperature alone changes the distributions of all requests."""
        return not self.processors and self.top_k is None and self.top_p is None and self.min_p is None

    @property
    def tail_len(self) -> int:
        """Most last tokens that a processor reads."""
        return max((processor.tail_len for processor in self.processors), default=0)

    def select(self, rows: Tensor) -> SamplingBatch:
        """Returns the parameters of some requests; rows: (R,) int64."""

        def pick(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[rows]

        return replace(
            self,
            noise=self.noise.select(rows),
            greedy=self.greedy[rows],
            temperature=self.temperature[rows],
            top_k=pick(self.top_k),
            top_p=pick(self.top_p),
            min_p=pick(self.min_p),
            processors=tuple(processor.select(rows) for processor in self.processors),
        )

    @classmethod
    def build(
        cls, requests: Sequence[SamplingRequest], vocab_size: int, device: torch.device | str = "cpu"
    ) -> SamplingBatch:
        """Stacks requests into tensors."""
        params = [request.params for request in requests]

        def column(values: Sequence[float], neutral: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        greedy = [p.is_greedy for p in params]
        temperature = [1.0 if p.is_greedy else p.temperature for p in params]
        return cls(
            noise=KeyedNoise(torch.tensor([r.seed for r in requests], dtype=torch.int64, device=device)),
            vocab_size=vocab_size,
            greedy=torch.tensor(greedy, device=device),
            is_all_greedy=all(greedy),
            is_any_greedy=any(greedy),
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device)[:, None],
            top_k=column(top_k, vocab_size, torch.int64),
            largest_top_k=max(top_k),
            top_p=column([p.top_p for p in params], 1.0),
            min_p=column([p.min_p for p in params], 0.0),
            processors=build_processors(requests, vocab_size, device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeScores:
    """The target's logits at the nodes of a tree, with the requests' sampling parameters.

    Attributes:
        tree: The verified tree.
        logits: (R, V) float32, target logits at the nodes, without padding: each row predicts the token after a node.
        starts: (B,) int64, the row of each root; node i of a sequence has the i-th row after it.
        has_row_for_each: Whether the rows are all B N nodes in order, without padding and other sequences.
        batch: Sampling parameters of the B requests.
        history: Committed tokens of the B requests, the root included; may be None if no processor is in use.
        chosen: (R,) int64, `PassOutput.chosen` of the rows; None if the decoder chooses none.
    """

    tree: TokenTree
    logits: Tensor
    starts: Tensor
    has_row_for_each: bool = False
    batch: SamplingBatch
    history: History | None
    chosen: Tensor | None = None

    def select(self, rows: Tensor) -> NodeScores:
        """Returns the scores of some sequences of the batch; rows: (R,) int64."""
        return NodeScores(
            tree=self.tree.select(rows),
            logits=self.logits,
            starts=self.starts[rows],
            batch=self.batch.select(rows),
            history=self.history and self.history.select(rows),
            chosen=self.chosen,
        )

    def processed(self, nodes: Tensor) -> Tensor:
        """Returns (B, V) float32 logits after the processors, before temperature; nodes: (B,) int64, one a sequence."""
        rows = self.logits[self.starts + nodes]
        if self.history is None or not self.batch.processors:
            return rows
        path = self.tree.path_tokens(nodes)
        return apply_processors(self.batch.processors, rows, NodeView(self.history.extended(path), path))

    def log_probs(self, nodes: Tensor) -> Tensor:
        """Returns the warped distribution of the token after each node; one-hot for greedy requests.

        nodes: (B,) int64, one node per sequence; returns (B, V) float32 log-probabilities.
        """
        logits = self.processed(nodes)
        if self.batch.is_all_greedy:
            return one_hot_log_probs(logits)
        log_probs = warp(logits, self.batch)
        if not self.batch.is_any_greedy:
            return log_probs
        return torch.where(self.batch.greedy.unsqueeze(1), one_hot_log_probs(logits), log_probs)

    def argmax(self, nodes: Tensor) -> Tensor:
        """Returns the most probable token after each node, lowest id first, -1 if none is possible; (B,) int64."""
        return best_possible(self.processed(nodes))

    def argmax_everywhere(self) -> Tensor | None:
        """Returns `argmax` of all nodes at once, (B, N) int64; None if processors read the history of each node."""
        if self.history is not None and self.batch.processors:
            return None
        if runs_cpu_kernels(self.logits.device):  # numpy's argmax is vectorised along a row, torch's is not
            return self.by_node(torch.from_numpy(self.logits.numpy().argmax(-1)))
        return self.by_node(self.logits.argmax(-1))

    def by_node(self, values: Tensor) -> Tensor:
        """Returns values of the rows, (R, …), in the order of the nodes, (B, N, …); arbitrary at padding."""
        shape = self.tree.tokens.shape
        if self.has_row_for_each:
            return values.view(*shape, *values.shape[1:])
        rows = self.starts.unsqueeze(1) + torch.arange(shape[1], device=values.device)
        return values[rows.clamp_max(values.shape[0] - 1)]

    def drawn_everywhere(self, root_positions: Tensor) -> Tensor:
        """Returns the target's draw after every node: argmax of logits / temperature plus the noise of its position.

        For requests with temperature as the only change of the distribution. Each request must always use this
        function, or never: it rounds differently from the walk node by node, so two almost equal tokens could swap.

        root_positions: (B,) int64, absolute position of each root; returns (B, N) int64.
        """
        if self.chosen is not None:
            return self.by_node(self.chosen)
        from foretoken.sampling.triton_choice import chosen_tokens

        positions = root_positions.unsqueeze(1) + self.tree.depths + 1
        scales, seeds = self.batch.inverse_temperature, self.batch.noise.seeds
        return chosen_tokens(self.by_node(self.logits), scales, seeds, positions).tokens

    def unwarped_log_probs(self, nodes: Tensor) -> Tensor:
        """Returns processed log-probabilities at temperature 1, nothing cut off; (B, V) float32."""
        return self.processed(nodes).log_softmax(1)
