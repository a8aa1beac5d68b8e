"""Checks every invariant of a tree that drafters, merging and pruning keep."""

import torch

from foretoken.core.errors import TreeError
from foretoken.core.token_tree import MAX_NODES, DraftDistributions, DrawKind, TokenTree


def check_tree(tree: TokenTree) -> None:
    """Raises `TreeError`, which names the first error."""
    if tree.width > MAX_NODES:
        raise TreeError(f"a tree has {tree.width} nodes. Expected at most {MAX_NODES}. Lower max_nodes.")
    shapes = {name: tuple(getattr(tree, name).shape) for name in ("tokens", "parents", "depths")}
    if len(set(shapes.values())) != 1 or tuple(tree.num_nodes.shape) != (tree.batch_size,):
        raise TreeError(f"tree tensors differ in shape: {shapes}, num_nodes {tuple(tree.num_nodes.shape)}.")
    counts = tree.num_nodes.tolist()
    if not all(1 <= count <= tree.width for count in counts):
        raise TreeError(f"num_nodes is {counts}. Expected 1..{tree.width}, the root included.")
    again = TokenTree.from_rows(tree.rows())  # checks tokens and parents
    if not torch.equal(again.parents, tree.parents.cpu()):
        raise TreeError("padding nodes must have parent -1 and the widest tree must have no padding.")
    if not torch.equal(again.depths, tree.depths.cpu()) or again.max_depth > tree.max_depth:
        raise TreeError("depths disagree with parents, or max_depth is below the greatest depth.")
    if tree.distributions is not None:
        _check_distributions(tree, tree.distributions)


def assert_same_tree(ours: TokenTree, theirs: TokenTree, tolerance: float) -> None:
    """Checks ours, and that both are the same; scores and stated distributions up to rounding."""
    check_tree(ours)
    for name in ("tokens", "parents", "depths", "num_nodes"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.host_facts == theirs.host_facts
    torch.testing.assert_close(ours.scores, theirs.scores, rtol=tolerance, atol=tolerance)
    assert (ours.distributions is None) == (theirs.distributions is None)
    if ours.distributions is None or theirs.distributions is None:
        return
    assert torch.equal(ours.distributions.kinds, theirs.distributions.kinds)
    assert torch.equal(ours.distributions.row_of, theirs.distributions.row_of)
    assert ours.distributions.max_siblings == theirs.distributions.max_siblings
    for row, nodes in enumerate(ours.distributions.row_of):
        stated = nodes[nodes >= 0]
        mine, other = ours.distributions.rows[row, stated], theirs.distributions.rows[row, stated]
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance / 100)


def _check_distributions(tree: TokenTree, drafts: DraftDistributions) -> None:
    if drafts.kinds.shape != tree.tokens.shape or drafts.row_of.shape != tree.tokens.shape:
        shapes = {"kinds": tuple(drafts.kinds.shape), "row_of": tuple(drafts.row_of.shape)}
        raise TreeError(f"draft distributions {shapes} do not fit the tree {tuple(tree.tokens.shape)}.")
    is_sampled = (drafts.kinds != DrawKind.ONE_HOT) & (tree.parents >= 0)
    sequence, node = is_sampled.nonzero(as_tuple=True)
    kind, row, token = drafts.kinds[sequence, node], drafts.row_of[sequence, node], tree.tokens[sequence, node]
    _, num_rows, vocab_size = drafts.rows.shape
    for name, values, end in (("kind", kind, len(DrawKind)), ("row_of", row, num_rows), ("token", token, vocab_size)):
        wrong = ((values < 0) | (values >= end)).nonzero()
        if wrong.numel():
            at = int(wrong[0])
            raise TreeError(
                f"tree {int(sequence[at])}: sampled node {int(node[at])} has {name} {int(values[at])}. "
                f"Expected 0..{end - 1}."
            )
    probs = drafts.rows[sequence, row]
    is_valid = (probs >= 0).all(1) & ((probs.sum(1) - 1).abs() < 1e-3) & (probs.gather(1, token.unsqueeze(1))[:, 0] > 0)
    if not bool(is_valid.all()):
        at = int((~is_valid).nonzero()[0])
        raise TreeError(
            f"tree {int(sequence[at])}: node {int(node[at])} was not drawn from its draft distribution. Expected "
            "probabilities that sum to 1 and are above 0 at the token."
        )
    siblings = torch.zeros_like(tree.parents).scatter_add_(1, tree.parents.clamp_min(0), is_sampled.to(torch.int64))
    if int(siblings.max()) > drafts.max_siblings:
        raise TreeError(
            f"a node has {int(siblings.max())} sampled children. Expected at most max_siblings, {drafts.max_siblings}."
        )
