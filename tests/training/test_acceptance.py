"""The acceptance table of draft models against a plain count, and the trees that a table gives."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from end_to_end.tiny_llms import noisy, target, tokenizer

from foretoken import LLM
from foretoken.bench.workload import Workload
from foretoken.core.errors import ConfigError
from foretoken.hf.loading import wrap_model
from foretoken.training.acceptance import measured_acceptance, tuned_tree
from foretoken.trees.choices import TreeShape


def test_a_draft_models_table_is_a_plain_count() -> None:
    """Of the tokens that the target wrote, prompts left out, by their rank in the draft model's own forward."""
    workload = Workload(prompts=["the ring", "abc", "he"], temperatures=(0.0, 0.7), max_tokens=12)
    draft, own = noisy(), wrap_model(target(), name="target")
    table = measured_acceptance(wrap_model(draft, name="draft"), own, tokenizer(), workload)
    llm = LLM(target(), tokenizer=tokenizer())
    ranks = []
    for temperature in workload.temperatures:
        for output in llm.generate(list(workload.prompts), workload.params(temperature)):
            prompt, text = output.prompt_token_ids, [*output.prompt_token_ids, *output.outputs[0].token_ids]
            with torch.inference_mode():
                logits = draft(torch.tensor([text])).logits[0]
            order = logits.argsort(dim=1, descending=True)
            ranks += [int((order[at - 1] == text[at]).nonzero()) for at in range(len(prompt), len(text))]
    assert len(ranks) == 2 * 3 * 12
    assert table == [[round(ranks.count(rank) / len(ranks), 5) for rank in range(10)]]
    assert 0.2 < table[0][0] < 1.0, "the draft model is neither useless nor the target"


def test_the_tree_of_a_table_is_the_best_of_all_trees() -> None:
    table = [[0.6, 0.2, 0.05], [0.5, 0.3, 0.0], [0.4, 0.1, 0.0]]
    every = [choice for length in (1, 2, 3) for choice in product(range(3), repeat=length)]

    def expected(choices: tuple[tuple[int, ...], ...]) -> float:
        values = (torch.tensor([table[d][rank] for d, rank in enumerate(choice)]).prod().item() for choice in choices)
        return 1.0 + sum(values)

    def is_tree(choices: tuple[tuple[int, ...], ...]) -> bool:
        return all(len(choice) == 1 or choice[:-1] in choices for choice in choices)

    tuned = tuned_tree(table, max_nodes=5, sizes=(2, 3, 4))
    for size in (2, 3, 4, 5):
        best = max(expected(choices) for choices in combinations(every, size - 1) if is_tree(choices))
        assert tuned.tokens_by_nodes[size] == pytest.approx(best)
    assert expected(tuned.shape.choices) == pytest.approx(tuned.tokens_by_nodes[5])
    assert TreeShape.parse([list(choice) for choice in tuned.shape.choices]) == tuned.shape


def test_candidates_that_were_never_right_are_no_nodes() -> None:
    assert tuned_tree([[0.5, 0.0]], max_nodes=9).shape == TreeShape.chain(1)
    with pytest.raises(ConfigError, match="no candidate was right even once"):
        tuned_tree([[0.0, 0.0]], max_nodes=9)
