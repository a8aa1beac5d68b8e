"""Objectives of EAGLE, HASS, EAGLE-3 and MTP against drafts that are made one by one, each from its own position.

The slow side feeds the decoder layer whole texts: the true features up to where a draft begins, then its own states.
"""

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from heads.head_formulas import numbers
from torch import Tensor

from foretoken.decoder.native_linear import HeadRows
from foretoken.heads.base import IN_PLACE, AutoregressiveConfig, AutoregressiveHead, WindowPositions, build_head
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.eagle import EagleConfig
from foretoken.heads.eagle3 import Eagle3Config
from foretoken.heads.mtp import MtpConfig, MtpLayerConfig
from foretoken.models.parts import TargetParts
from foretoken.training.objective_base import Examples, HeadSums, Objective, accumulate, label_counts
from foretoken.training.objectives import Eagle3Objective, EagleObjective, HassObjective, MtpObjective

B, S, E, V, K = 2, 11, 8, 13, 3
LAYER = LayerConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=4, intermediate_size=12)
TOKEN_MAP = torch.tensor([1, 2, 4, 5, 7, 8, 11, 12])
EAGLE = EagleConfig(hidden_size=E, vocab_size=V, layer=LAYER, num_steps=K)
EAGLE3 = Eagle3Config(hidden_size=E, vocab_size=V, layer=LAYER, num_steps=K, boundaries=(1, 2, 4))
MTP = MtpConfig(hidden_size=E, vocab_size=V, num_steps=K, layer=MtpLayerConfig(**LAYER.model_dump(), rotary_dim=2))
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
MIXTURE = MTP.model_copy(update={"layer": MtpLayerConfig(**MTP.layer.model_dump() | EXPERTS)})
PARTIAL = EAGLE3.model_copy(update={"draft_vocab_size": len(TOKEN_MAP)})

ANCHORED = WindowPositions(torch.tensor([[0], [4]]), torch.tensor([[5], [700]]))

CASES: dict[str, tuple[AutoregressiveConfig, Objective]] = {
    "eagle": (EAGLE, EagleObjective(noise=0.0)),
    "eagle, three steps": (EAGLE, EagleObjective(noise=0.0, passes=3, head_decay=0.7)),
    "hass": (EAGLE, HassObjective(noise=0.0, num_top=4)),
    "hass, part of the vocabulary": (EAGLE, HassObjective(noise=0.0, num_top=4, ce_weight=0.5)),
    "eagle3": (EAGLE3, Eagle3Objective()),
    "eagle3, part of the vocabulary": (PARTIAL, Eagle3Objective()),
    "eagle3, part of the vocabulary and the text": (PARTIAL, Eagle3Objective(ce_weight=0.5, passes=2)),
    "mtp": (MTP, MtpObjective()),
    "mtp with experts": (MIXTURE, MtpObjective()),
    "mtp, the text alone": (MTP, MtpObjective(kl_weight=0.0, ce_weight=1.0)),
}
TAUGHT = {"hass, part of the vocabulary": TOKEN_MAP}  # tokens that the shared LM head has rows of


def parts(taught: Tensor | None = None) -> TargetParts:
    """`taught`: the tokens that a shared LM head has rows of."""
    table, rows = numbers(V, E, seed=1), numbers(V, E, seed=2)
    head = torch.nn.Linear(E, V, bias=False, dtype=torch.float64)
    head.weight.data.copy_(rows)
    part = None if taught is None else HeadRows(head, taught)
    lm_head = head if part is None else part.layer
    return TargetParts(embed=lambda ids: table[ids], lm_head=lm_head, lm_head_weight=rows, head_rows=part)


def examples(config: AutoregressiveConfig) -> Examples:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, V, (B, S), generator=generator)
    supervised = torch.rand(B, S, generator=generator) < 0.7
    features = numbers(B, S, len(config.taps) * E, seed=4)
    return Examples(tokens, supervised, features, features if len(config.taps) == 1 else numbers(B, S, E, seed=5))


def random_head(config: AutoregressiveConfig) -> AutoregressiveHead:
    head = build_head(config, dtype=torch.float64)
    assert isinstance(head, AutoregressiveHead)
    with torch.no_grad():
        for seed, parameter in enumerate(head.parameters()):
            parameter.copy_(0.4 * numbers(*parameter.shape, seed=50 + seed))
    if head.token_map is not None:
        head.token_map = TOKEN_MAP
    return head


def drafts(head: AutoregressiveHead, given: Examples, begin: int, *, is_detached: bool) -> Iterator[Tensor]:
    """(B, W) for each step, what the logits of the draft that begins at a position are read from."""
    states, shared = head.initial_state(given.features[:, : begin + 1]), parts()
    for index in range(head.config.num_steps):
        following = given.tokens[:, 1 : begin + 2 + index]
        inputs, side = head.paired(states, head.embed(following, shared))
        positions = given.positions.of(torch.arange(inputs.shape[1]))
        state, hidden = head.outputs(head.layer(inputs, positions, side)[:, -1])
        yield hidden[:, :]
        if begin + 2 + index >= S:
            return
        states = torch.cat([states, (state.detach() if is_detached else state).unsqueeze(1)], dim=1)


def slow_loss(
    head: AutoregressiveHead, given: Examples, objective: Objective, taught: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss with its graph, and sums and matches by step."""
    weights, shared = objective.distance_weights, parts()
    steps = objective.steps(head.config)
    sums, matches = [torch.zeros((), dtype=torch.float64) for _ in range(steps)], torch.zeros(steps)
    for begin in range(S - 2):
        for j, hidden in enumerate(drafts(head, given, begin, is_detached=isinstance(objective, HassObjective))):
            place = begin + 1 + j
            if j >= steps or place + 1 >= S:
                break
            for b in range(B):
                if not given.supervised[b, place + 1]:
                    continue
                says, teaches = head.draft_logits(j, hidden[b], shared), shared.lm_head(given.final[b, place])
                label = int(given.tokens[b, place + 1])
                if head.token_map is not None:
                    ids = head.token_map.tolist()
                    if int(teaches.argmax()) not in ids or (weights.token and label not in ids):
                        continue
                    teaches, label = teaches[head.token_map], ids.index(label) if label in ids else 0
                apart = (hidden[b] - given.final[b, place]).abs()
                sums[j] = sums[j] + objective.feature_weight * torch.where(apart < 1, apart**2 / 2, apart - 0.5).mean()
                if taught is not None:
                    if label not in taught.tolist():  # which teaches the feature alone
                        continue
                    says, teaches, label = says[taught], teaches[taught], taught.tolist().index(label)
                log_q, p = says.log_softmax(0), teaches.softmax(0)
                top = p.argsort(descending=True)[: weights.num_top]
                sums[j] = sums[j] + (
                    -weights.token * log_q[label]
                    + weights.kl * (p * (p.log() - log_q)).sum()
                    - weights.top * (p[top] * log_q[top]).sum()
                )
                matches[j] += says.argmax() == p.argmax()
    counts = label_counts(given.supervised, steps)
    if isinstance(objective, Eagle3Objective):
        counts = counts[:1].expand(steps)
    loss = torch.stack([objective.head_decay**j * part / counts[j] for j, part in enumerate(sums)]).sum()
    return loss, torch.stack(sums).detach(), matches


def gradients(head: AutoregressiveHead) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}


def learned(head: AutoregressiveHead, given: Examples, objective: Objective, taught: Tensor | None = None) -> HeadSums:
    counts = label_counts(given.supervised, objective.steps(head.config))
    return accumulate(objective, head, given, parts(taught), counts=counts)


@pytest.mark.parametrize("positions", [IN_PLACE, ANCHORED], ids=["in place", "anchored"])
@pytest.mark.parametrize("name", CASES)
def test_drafts_one_by_one(name: str, positions: WindowPositions) -> None:
    config, objective = CASES[name]
    given, head, naive = examples(config), random_head(config), random_head(config)
    given = replace(given, positions=positions)
    found = learned(head, given, objective, TAUGHT.get(name))
    loss, sums, matches = slow_loss(naive, given, objective, TAUGHT.get(name))
    loss.backward()
    torch.testing.assert_close(found.loss, sums, rtol=1e-9, atol=1e-9)
    assert found.matches.tolist() == matches.tolist()
    assert found.matches.sum() > 0
    expected, made = gradients(naive), gradients(head)
    assert expected.keys() == made.keys()
    for key, grad in made.items():
        torch.testing.assert_close(grad, expected[key], rtol=1e-8, atol=1e-10, msg=key)


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize("name", ["hass", "eagle3, part of the vocabulary"])
def test_every_few_drafts_teach_the_same_on_average(name: str, stride: int) -> None:
    config, objective = CASES[name]
    given, whole = examples(config), random_head(config)
    of_all = learned(whole, given, objective)
    total, some = HeadSums(*(torch.zeros_like(part) for part in (of_all.loss, of_all.matches, of_all.count))), []
    for offset in range(stride):
        head = random_head(config)
        with mock.patch("torch.randint", lambda *_, offset=offset: torch.tensor(offset)):
            total = total + learned(head, given, objective.model_copy(update={"stride": stride}))
        some.append(gradients(head))
    for ours, theirs in ((total.loss, of_all.loss), (total.matches, of_all.matches), (total.count, of_all.count)):
        torch.testing.assert_close(ours / stride, theirs, rtol=1e-9, atol=1e-9)
    for key, grad in gradients(whole).items():
        mean = torch.stack([each[key] for each in some]).mean(0)
        torch.testing.assert_close(mean, grad, rtol=1e-8, atol=1e-10)
    assert not torch.allclose(some[0]["layer.q_proj.weight"], some[1]["layer.q_proj.weight"])


def test_noise_grows_as_windows_get_shorter() -> None:
    """As in the released code of EAGLE: U(-0.1, 0.1) for windows of 512 positions."""
    objective = EagleObjective()
    assert objective.noise_bound(512, E) == pytest.approx(0.1)
    assert objective.noise_bound(128, E) == pytest.approx(0.4)


def test_passes_of_eagle3_are_weighed_as_in_the_released_code() -> None:
    """That code takes the mean over all tokens of the batch: the same gradients, up to one factor for all passes."""
    config, objective = EAGLE3, Eagle3Objective(passes=K)
    given, head, other = examples(config), random_head(config), random_head(config)
    learned(head, given, objective)
    shared = parts()
    steps = other.unrolled(given.features, given.tokens, shared)
    losses = []
    for index, hidden in zip(range(K), steps, strict=False):
        mask = torch.zeros(B, S, dtype=torch.float64)  # of places t, at which pass `index` says the token t + 2 + index
        mask[:, : S - 2 - index] = given.supervised[:, 2 + index :].double()
        teaches = torch.zeros(B, S, V, dtype=torch.float64)
        teaches[:, : S - 1 - index] = shared.lm_head(given.final[:, 1 + index :]).softmax(-1)
        says = torch.zeros(B, S, V, dtype=torch.float64)
        says[:, : hidden.shape[1]] = other.draft_logits(index, hidden, shared).log_softmax(-1)
        losses.append(-(mask[..., None] * teaches * says).sum(2).mean())
    torch.stack([0.8**index * loss for index, loss in enumerate(losses)]).sum().backward()
    factor = B * S / float(given.supervised[:, 2:].sum())
    assert given.supervised[:, 2 + K - 1 :].sum() < given.supervised[:, 2:].sum(), "later passes have fewer positions"
    for name, grad in gradients(head).items():
        torch.testing.assert_close(grad, factor * gradients(other)[name], rtol=1e-8, atol=1e-10, msg=name)
