"""Drafts of a draft model with another vocabulary are accepted without bias, exactly: all drafts, all choices."""

from dataclasses import replace

import pytest
import torch
from drafting import drafts, independent, tables, without_replacement
from end_to_end.tiny_llms import byte_level_tokenizer
from enumeration import EXACT, exact_distribution

from foretoken.acceptance.sampled_rules import accept_block, accept_sequential
from foretoken.drafters.vocabularies import Vocabulary, VocabularyMap


@pytest.mark.parametrize("shape", [(1, 1), (2, 1)], ids=str)
def test_distributions_over_the_shared_tokens(shape: tuple[int, ...]) -> None:
    """A target of four tokens of which the draft model has three, and others besides."""
    target = Vocabulary(byte_level_tokenizer([b"a", b"b", b"c", b"d"]), 4, "target")
    draft = Vocabulary(byte_level_tokenizer([b"x", b"d", b"a", b"y", b"b"]), 5, "draft")
    mapping = VocabularyMap(target, draft, torch.device("cpu"))
    p, _ = tables("dense", 4, len(shape))
    logits = torch.randn(len(p), 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q = mapping.to_target(logits).softmax(1)
    assert (q[:, 2] == 0).all()
    draw = independent if max(shape) == 1 else without_replacement
    every_draft = drafts([draw(q, width) for width in shape], 4)
    rules = [accept_sequential] if max(shape) > 1 else [accept_sequential, accept_block]
    for rule in rules:
        assert exact_distribution(rule, every_draft, p, walks=True).error <= EXACT
    stated = every_draft.tree.distributions
    assert stated is not None
    unmapped = replace(stated, rows=logits[:1, :4].softmax(1).expand_as(stated.rows))
    wrong = replace(every_draft, tree=replace(every_draft.tree, distributions=unmapped))
    assert exact_distribution(accept_sequential, wrong, p, walks=True).error > 1e-3
