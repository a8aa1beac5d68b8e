"""Closed forms of speculative decoding: acceptance, tokens, time, operations, and the roofline of a pass.

Letters are those of Leviathan et al. 2023 (arXiv 2211.17192): p is the target distribution, q the draft distribution,
alpha the acceptance rate, gamma the depth of a chain, c the seconds of one drafted token divided by the seconds of a
plain pass. Knows neither models nor clocks, and needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul

from foretoken.core.errors import ConfigError

Floats = Sequence[float]


def acceptance_probability(target_probs: Floats, draft_probs: Floats) -> float:
    """Returns the probability beta that a token drawn from q is accepted, the sum of min(p, q).

    Its mean over positions is alpha. Both arguments have V entries that sum to 1.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.5 and corollary 3.6.
    """
    return sum(map(min, target_probs, draft_probs))


def total_variation(target_probs: Floats, draft_probs: Floats) -> float:
    """Returns the total-variation distance of two distributions with V entries, the paper's D_LK; 1 - beta.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), definition 3.2 and lemma 3.3.
    """
    return sum(abs(p - q) for p, q in zip(target_probs, draft_probs, strict=True)) / 2


def chain_tokens(alpha: float, gamma: int) -> float:
    """Returns the expected tokens of a pass over a chain, the correction or bonus token included.

    Every token is accepted with probability alpha, independently of the others.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
    """
    _check_share("alpha", alpha)
    return gamma + 1.0 if alpha == 1 else (1 - alpha ** (gamma + 1)) / (1 - alpha)


def survivals(rates: Floats) -> list[float]:
    """Returns P(at least k tokens are accepted) for each depth k of a chain.

    Args:
        rates: P(token k is accepted | the tokens before it are), k = 1, 2, …
    """
    return list(accumulate(rates, mul))


def expected_tokens(survived: Floats) -> float:
    """Returns the expected tokens of a pass from the survivals of a chain's depths, or of all nodes of a tree.

    Any dependence between tokens is allowed: the number of accepted tokens is the number of accepted nodes.

    Source: linearity of expectation; for trees Chen et al. 2024 (Sequoia, arXiv 2402.12374), section 3.1.
    """
    return 1.0 + sum(survived)


def tree_survivals(choices: Sequence[Sequence[int]], rates: Sequence[Floats]) -> list[float]:
    """Returns the probability that each node of a tree is accepted.

    Args:
        choices: Nodes as the ranks on the path from the root, in Medusa's notation: (0, 1) is the second best
            candidate below the best one.
        rates: `rates[d][r]` is P(candidate r at depth d + 1 is right | its parent is).

    Source: Cai et al. 2024 (Medusa, arXiv 2401.10774), section 2.3.3; Chen et al. 2024 (Sequoia, arXiv 2402.12374),
    section 3.1, where rates depend on the rank alone.
    """
    return [prod(rates[depth][rank] for depth, rank in enumerate(choice)) for choice in choices]


def walltime_factor(alpha: float, gamma: int, c: float) -> float:
    """Returns the speed-up of a chain whose verification takes as long as a plain pass.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8.
    """
    return speed_up(chain_tokens(alpha, gamma), draft=gamma * c, verify=1.0)


def speed_up(tokens: float, *, draft: float, verify: float) -> float:
    """Returns the speed-up over plain decoding when verification is not free.

    Args:
        tokens: Expected tokens of a pass.
        draft: Seconds of drafting divided by those of a plain pass; gamma * c for a chain.
        verify: v(T), seconds of a pass over T tokens divided by those of a plain pass.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8 with v(gamma + 1) instead of 1.
    """
    return tokens / (draft + verify)


def goodput(tokens: float, *, batch: int, verify: float, draft: float, host: float) -> float:
    """Returns the tokens per second of a batch. Controllers and plans maximise this number.

    Args:
        tokens: Expected tokens of one sequence in a pass.
        batch: Sequences in the pass.
        verify: Seconds of the pass over all trees.
        draft: Seconds of drafting for the whole batch.
        host: Other seconds of the iteration.

    Source: Liu et al. 2024 (SmartSpec, arXiv 2406.14066), its goodput: accepted and bonus tokens over step time.
    """
    return batch * tokens / (verify + draft + host)


def operations_factor(alpha: float, gamma: int, c_hat: float) -> float:
    """Returns the arithmetic operations per token relative to plain decoding.

    Args:
        alpha: Acceptance rate.
        gamma: Depth of the chain.
        c_hat: Operations of one drafted token divided by those of one token of the target.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.11.
    """
    return (gamma * c_hat + gamma + 1) / chain_tokens(alpha, gamma)


def optimal_gamma(alpha: float, c: float, *, most: int = 256) -> tuple[int, float]:
    """Returns the depth from 0 to `most` with the greatest `walltime_factor`, and that factor.

    Depth 0 is plain decoding. The optimum is `most` if drafts cost nothing.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), section 3.5; corollary 3.9: some depth helps if alpha > c.
    """
    best = max(range(most + 1), key=lambda gamma: walltime_factor(alpha, gamma, c))
    return best, walltime_factor(alpha, best, c)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of a model that decide what a pass costs.

    Attributes:
        layers: L, with attention.
        hidden_size: D.
        heads: H, query heads.
        kv_heads: Hk.
        head_dim: Width of a head.
        vocab_size: V, logits of a token; 0 without an LM head.
        weights: Weights that every pass reads: all but the experts and an embedding that only looks up rows.
        experts: Experts of a layer; 0 for a dense model.
        experts_per_token: Experts that a token uses.
        expert_weights: Weights of one expert, summed over the layers.
        weight_bytes: Bytes of a weight.
        kv_bytes: Bytes of an element of the KV cache.
    """

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    weights: float
    experts: int = 0
    experts_per_token: int = 0
    expert_weights: float = 0.0
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    @property
    def active_weights(self) -> float:
        """Weights that one token uses."""
        return self.weights + self.experts_per_token * self.expert_weights

    @property
    def weights_bytes(self) -> float:
        """Bytes of all weights that passes read."""
        return self.weight_bytes * (self.weights + self.experts * self.expert_weights)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of the keys and values of one position."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A device as the roofline sees it.

    Attributes:
        bytes_per_s: Memory bandwidth that passes reach.
        flops_per_s: Arithmetic that passes reach, in the dtype of the weights.
        memory_bytes: Memory for weights and KV cache.
        launch_s: Fixed seconds of a pass.
    """

    bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    launch_s: float = 0.0

    @property
    def ridge(self) -> float:
        """Operations per byte from which arithmetic takes longer than memory."""
        return self.flops_per_s / self.bytes_per_s


_LOGIT_READS = 3  # times that softmax and sampling go over float32 logits; a choice: two for softmax, one for the draw


def touched_experts(experts: int, experts_per_token: int, tokens: float) -> float:
    """Returns the expected number of experts that some token of a pass uses, if every expert is equally likely.

    Source: linearity of expectation; an expert stays idle with probability (1 - k / E) ** tokens.
    """
    return experts * (1 - (1 - experts_per_token / experts) ** tokens) if experts else 0.0


def pass_seconds(sizes: ModelSizes, machine: Machine, *, contexts: Floats, width: float) -> float:
    """Returns the seconds of a pass by the roofline: weights, then the KV cache, then logits.

    Each part takes the longer of its memory traffic and its arithmetic. A sequence reads its KV cache once for all of
    its tokens. A wide pass of a mixture of experts reads more experts.

    Args:
        sizes: The model.
        machine: The device.
        contexts: Committed tokens of each of B sequences.
        width: Tokens of each sequence in the pass.

    Source: Williams et al. 2009 (roofline, doi 10.1145/1498765.1498785), applied to each part of a decoder.
    """
    tokens, committed = len(contexts) * width, sum(contexts)
    touched = touched_experts(sizes.experts, sizes.experts_per_token, tokens)
    weights = machine_seconds(
        machine,
        num_bytes=sizes.weight_bytes * (sizes.weights + touched * sizes.expert_weights),
        flops=2 * sizes.active_weights * tokens,
    )
    cache = machine_seconds(
        machine,
        num_bytes=sizes.kv_bytes_per_token * committed,
        flops=4 * sizes.layers * sizes.heads * sizes.head_dim * width * (committed + tokens / 2),
    )
    logits = 4 * tokens * sizes.vocab_size * _LOGIT_READS / machine.bytes_per_s
    return machine.launch_s + weights + cache + logits


def machine_seconds(machine: Machine, *, num_bytes: float, flops: float) -> float:
    """Returns the longer of the times for memory and arithmetic."""
    return max(num_bytes / machine.bytes_per_s, flops / machine.flops_per_s)


def memory_bound_tokens(sizes: ModelSizes, machine: Machine) -> float:
    """Returns the tokens of a pass up to which reading a dense model's weights takes longer than arithmetic.

    Source: equality of the two terms of `pass_seconds`: weight_bytes * ridge / 2.
    """
    return sizes.weight_bytes * machine.ridge / 2


def throughput_multiplier(
    target: ModelSizes,
    draft: ModelSizes,
    machine: Machine,
    *,
    contexts: Floats,
    gamma: int,
    tokens: float,
    window: int | None = None,
) -> float:
    """Returns the modelled throughput multiplier: tokens per second with a draft model over those without.

    Both are modelled by `pass_seconds`, without host time. The name is that of Neelam et al. 2025 (SPIRe, arXiv
    2504.06419). The equation of that paper was not at hand, so this definition may differ in what a pass costs.

    Args:
        target: The target.
        draft: The draft model.
        machine: The device.
        contexts: Committed tokens of each sequence, which may differ.
        gamma: Depth of the chain.
        tokens: Expected tokens of a pass.
        window: Most tokens that the draft model attends to; None for all.
    """
    seen = contexts if window is None else [min(each, window) for each in contexts]
    plain = pass_seconds(target, machine, contexts=contexts, width=1)
    drafting = gamma * pass_seconds(draft, machine, contexts=seen, width=1)
    verify = pass_seconds(target, machine, contexts=contexts, width=gamma + 1)
    return speed_up(tokens, draft=drafting / plain, verify=verify / plain)


def alpha_from_counts(accepted: Sequence[int], gamma: int) -> float:
    """Returns the maximum-likelihood estimate of alpha from accepted tokens per pass, which gamma caps.

    The estimate is accepted / (accepted + rejections). Accepted over drafted tokens would fall as gamma grows, because
    nobody tests the tokens behind a rejection.

    Args:
        accepted: Accepted tokens of each pass, 0..gamma.
        gamma: Depth of every chain, at least 1.

    Raises:
        ConfigError: If a count is not in 0..gamma, or nothing was counted.

    Source: the likelihood of the capped geometric distribution of Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
    """
    wrong = [each for each in accepted if not 0 <= each <= gamma]
    if wrong or not accepted or gamma < 1:
        found = f"a pass accepted {wrong[0]} tokens" if wrong else f"{len(accepted)} passes were counted"
        raise ConfigError(f"{found} at depth {gamma}. Expected at least one pass, each with 0 to {gamma} tokens.")
    rejections = sum(each < gamma for each in accepted)
    return sum(accepted) / (sum(accepted) + rejections)


def alpha_from_overlaps(overlaps: Sequence[Floats], accepted: Sequence[int]) -> float:
    """Returns the Rao-Blackwell estimate of alpha: the mean of sum min(p, q) over the tested positions.

    It has the expectation of `alpha_from_counts` in numerator and denominator, and less variance, because each outcome
    of a test is replaced by its probability.

    Args:
        overlaps: For each pass the `acceptance_probability` at each of its gamma positions.
        accepted: Accepted tokens of each pass; the next position was tested too.

    Source: Rao-Blackwell theorem; the overlap is beta of Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.5.
    """
    tested = [each for row, count in zip(overlaps, accepted, strict=True) for each in row[: count + 1]]
    if not tested:
        raise ConfigError("no position was tested. Expected at least one pass with a draft.")
    return sum(tested) / len(tested)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} is {value}. Expected a probability from 0 to 1.")
