"""Counts how often every run of tokens occurs in some sequences, up to a length: a compressed suffix tree.

A path from the root spells a run of tokens. Its node counts the suffixes that begin with that run. Runs that occur once
need no node: their parent holds the place where they begin. Edges hold no tokens: tokens are read where the youngest
occurrence begins. Adding a token takes one walk down, through few nodes at any depth.

Sequences grow at the end and leave in the order in which they came, with all their suffixes. This makes eviction cheap:
a node's place is that of its youngest suffix, which exists as long as the node.

The tree knows neither drafts nor who may read which sequence.

Source: Oliaro et al. 2024 (arXiv 2411.04975), section 4; the layout of nodes is our own.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from operator import itemgetter
from sys import getsizeof

_OFFSET_BITS = 32  # of a place: a sequence, and the offset of a suffix in it
_OFFSET = (1 << _OFFSET_BITS) - 1
_WIDE = 32  # nodes with more children keep a set of frequent ones
FREQUENT_SHARE = 20  # a frequent child has at least one in so many of its parent's occurrences
_INT_BYTES = 32
_FREQUENT_BYTES = getsizeof(set(range(2 * FREQUENT_SHARE)))
_SEQUENCE_BYTES = 512  # of a sequence without its tokens: objects, and entries of dictionaries


class Node:
    """The end of an edge: at least two suffixes begin with the tokens down to here.

    Attributes:
        count: Number of these suffixes.
        depth: Tokens from the root.
        place: Where the youngest of these suffixes begins.
        children: By the first token of their edge; a place if only one suffix continues that way.
        frequent: Tokens of the children with a share of at least 1 / `FREQUENT_SHARE`, and some more; None if unknown.
    """

    __slots__ = ("children", "count", "depth", "frequent", "place")

    def __init__(self, count: int, depth: int, place: int, children: dict[int, Branch]) -> None:
        self.count, self.depth, self.place, self.children = count, depth, place, children
        self.frequent: set[int] | None = None


Branch = Node | int  # a child
_NODE_BYTES = getsizeof(Node(0, 0, 0, {})) + 2 * _INT_BYTES


class Text:
    """A sequence, with `num_counted` suffixes in the tree; `is_open`: tokens may follow."""

    __slots__ = ("is_open", "num_counted", "tokens")

    def __init__(self) -> None:
        self.tokens, self.num_counted, self.is_open = array("i"), 0, True


class SuffixTree:
    """Counts of the runs of up to `max_depth` tokens in sequences that come, grow and leave.

    A suffix of an open sequence is counted once it has `max_depth` tokens, a suffix of a closed sequence always.

    Attributes:
        max_depth: Longest run that is counted.
        root: The node of the empty run; counts all suffixes.
        num_bytes: Size of the tree, sequences included: dictionaries and arrays by `sys.getsizeof`, upper bounds for
            the rest, nothing for the allocator.
    """

    def __init__(self, max_depth: int) -> None:
        """Makes an empty tree; max_depth: at least 1."""
        self.max_depth = max_depth
        self.root = Node(0, 0, 0, {})
        self._texts: dict[int, Text] = {}  # oldest first
        self._next = 0
        self.num_bytes = _NODE_BYTES + getsizeof(self.root.children) + _SEQUENCE_BYTES

    def __len__(self) -> int:
        return len(self._texts)

    def begin(self) -> int:
        """Adds a sequence without tokens and returns its number; numbers rise."""
        text = self._texts[self._next] = Text()
        self._next += 1
        self.num_bytes += _SEQUENCE_BYTES + getsizeof(text.tokens)
        return self._next - 1

    def extend(self, sequence: int, tokens: Sequence[int]) -> None:
        """Appends tokens to an open sequence, and counts the suffixes that are now long enough."""
        text = self._texts[sequence]
        assert text.is_open, "closed sequences do not grow"
        before = getsizeof(text.tokens)
        text.tokens.extend(tokens)
        self.num_bytes += getsizeof(text.tokens) - before
        self._count_to(sequence, text, len(text.tokens) - self.max_depth + 1)

    def close(self, sequence: int) -> None:
        """Counts the last suffixes of a sequence, which no longer grows."""
        text = self._texts[sequence]
        if text.is_open:
            text.is_open = False
            self._count_to(sequence, text, len(text.tokens))

    def drop_oldest(self) -> int:
        """Removes the oldest sequence, open or closed, with all its counts; returns its number."""
        sequence, text = next(iter(self._texts.items()))
        tokens = text.tokens
        for offset in range(text.num_counted):
            self._remove(tokens, offset, min(self.max_depth, len(tokens) - offset))
        del self._texts[sequence]
        self.num_bytes -= _SEQUENCE_BYTES + getsizeof(tokens)
        return sequence

    def text(self, sequence: int) -> Text:
        """Returns a sequence that has not been removed."""
        return self._texts[sequence]

    def find(self, run: array[int]) -> Branch | None:
        """Returns the branch that a run of tokens leads to, or into; None if the run does not occur."""
        branch: Branch = self.root
        depth, length = 0, len(run)
        while depth < length:
            if isinstance(branch, int):
                return None
            child = branch.children.get(run[depth])
            if child is None:
                return None
            if isinstance(child, int):
                tokens, start, end = self.edge(child)
            else:  # as in `edge`
                place, end = child.place, child.depth
                tokens, start = self._texts[place >> _OFFSET_BITS].tokens, place & _OFFSET
            stop = end if end < length else length
            depth += 1
            if stop > depth and tokens[start + depth : start + stop] != run[depth:stop]:
                return None
            branch, depth = child, end
        return branch

    def edge(self, branch: Branch) -> tuple[array[int], int, int]:
        """Returns where a branch can be read: tokens, the offset where its first occurrence begins, and its depth."""
        if isinstance(branch, int):
            tokens, start = self._texts[branch >> _OFFSET_BITS].tokens, branch & _OFFSET
            return tokens, start, min(self.max_depth, len(tokens) - start)
        return self._texts[branch.place >> _OFFSET_BITS].tokens, branch.place & _OFFSET, branch.depth

    def likely_children(self, node: Node, least: float) -> Collection[tuple[int, Branch]]:
        """Returns first tokens and branches of the children with a count of at least `least`, perhaps among others.

        If `least` is at least `node.count` / `FREQUENT_SHARE`, the time depends on the number of results alone.
        """
        children = node.children
        if len(children) <= _WIDE or least * FREQUENT_SHARE < node.count:
            return children.items()
        if node.frequent is None:
            bound = node.count / FREQUENT_SHARE
            node.frequent = {token for token, child in children.items() if count_of(child) >= bound}
        return [(token, children[token]) for token in node.frequent]

    def _count_to(self, sequence: int, text: Text, stop: int) -> None:
        for offset in range(text.num_counted, stop):
            self._insert(sequence << _OFFSET_BITS | offset, text.tokens, offset)
            text.num_counted = offset + 1

    def _insert(self, place: int, tokens: array[int], offset: int) -> None:
        """Counts the suffix at an offset of a sequence; place: sequence and offset in one number."""
        length = min(self.max_depth, len(tokens) - offset)
        node, depth = self.root, 0
        node.count += 1
        while depth < length:
            token = tokens[offset + depth]
            child = node.children.get(token)
            if child is None:
                self._add_leaf(node, token, place)
                return
            others, start, end = self.edge(child)
            shared = _shared(tokens, offset, others, start, depth + 1, end if end < length else length)
            is_through = shared == end and not isinstance(child, int)
            if isinstance(child, int) or not is_through:
                child = self._split(node, token, child, shared)
                if shared < length:
                    self._add_leaf(child, tokens[offset + shared], place)
            child.count += 1
            child.place = max(child.place, place)
            if node.frequent is not None and child.count * FREQUENT_SHARE >= node.count:
                self._note_frequent(node, token)
            if not is_through:
                return
            node, depth = child, end

    def _add_leaf(self, node: Node, token: int, place: int) -> None:
        before = getsizeof(node.children)
        node.children[token] = place
        self.num_bytes += getsizeof(node.children) - before + 2 * _INT_BYTES
        if len(node.children) == _WIDE + 1:
            self.num_bytes += _FREQUENT_BYTES

    def _split(self, node: Node, token: int, child: Branch, depth: int) -> Node:
        """Makes a node on the edge to a child, or at its end if the child is a suffix."""
        tokens, start, end = self.edge(child)
        place = child if isinstance(child, int) else child.place
        upper = node.children[token] = Node(count_of(child), depth, place, {})
        if depth < end:
            upper.children[tokens[start + depth]] = child
            self.num_bytes += _INT_BYTES
        else:
            self.num_bytes -= _INT_BYTES  # the suffix that ended here loses its entry
        self.num_bytes += _NODE_BYTES + getsizeof(upper.children)
        return upper

    def _note_frequent(self, node: Node, token: int) -> None:
        assert node.frequent is not None
        node.frequent.add(token)
        if len(node.frequent) >= 2 * FREQUENT_SHARE:  # the counts of most have fallen behind
            bound = node.count / FREQUENT_SHARE
            node.frequent = {each for each in node.frequent if count_of(node.children[each]) >= bound}

    def _remove(self, tokens: array[int], offset: int, length: int) -> None:
        above, edge, node, depth = self.root, 0, self.root, 0
        while True:
            node.count -= 1
            node.frequent = None  # other children may be frequent now
            if depth == length:
                break
            token = tokens[offset + depth]
            child = node.children[token]
            if isinstance(child, int):
                del node.children[token]
                self.num_bytes -= 2 * _INT_BYTES
                if len(node.children) == _WIDE:
                    self.num_bytes -= _FREQUENT_BYTES
                break
            if child.count == 2:  # only the younger suffix is left
                node.children[token] = child.place
                self.num_bytes -= self._size(child) - _INT_BYTES
                return
            above, edge, node, depth = node, token, child, child.depth
        only = next(iter(node.children.values())) if len(node.children) == 1 else 0
        if isinstance(only, Node) and only.count == node.count and node is not self.root:
            above.children[edge] = only
            self.num_bytes -= self._size(node)

    @staticmethod
    def _size(node: Node) -> int:
        entries = sum(2 if isinstance(child, int) else 1 for child in node.children.values())
        return _NODE_BYTES + getsizeof(node.children) + _INT_BYTES * entries


def count_of(branch: Branch) -> int:
    """Returns the number of suffixes that go through a branch."""
    return 1 if isinstance(branch, int) else branch.count


def _shared(one: array[int], start: int, other: array[int], at: int, begin: int, end: int) -> int:
    """Returns how far two suffixes agree, at most `end`, given that they agree up to `begin`."""
    if one[start + begin : start + end] == other[at + begin : at + end]:
        return end
    while one[start + begin] == other[at + begin]:
        begin += 1
    return begin


class Match:
    """All occurrences of a run of tokens.

    Attributes:
        branch: Occurrences in the tree; None for none.
        depth: Tokens of the run.
        count: Number of occurrences.
        ends: Ends of occurrences in the text itself that the tree does not count yet.
    """

    __slots__ = ("branch", "count", "depth", "ends")

    def __init__(self, branch: Branch | None, depth: int, count: int, ends: Sequence[int] = ()) -> None:
        self.branch, self.depth, self.count, self.ends = branch, depth, count, ends

    def longer(self, more: int) -> Match:
        """Returns the match with `more` further tokens, which followed all its occurrences."""
        return Match(self.branch, self.depth + more, self.count)


class SuffixMatches:
    """Matches of the end of a text with a tree, at most `longest` tokens; valid until either changes."""

    def __init__(self, tree: SuffixTree, text: array[int], num_counted: int | None = None) -> None:
        """Finds the longest match.

        Args:
            num_counted: Suffixes of the text that the tree counts, if the text is one of the tree's open sequences or
                begins with one; else None.
        """
        self._tree, self._text, self._first = tree, text, num_counted
        self._ends: list[int] = []  # where the last token occurs among the suffixes that are not counted
        if num_counted is not None and text:
            last = text[-1]
            self._ends = [end for end in range(num_counted + 1, len(text) + 1) if text[end - 1] == last]
        self.longest = self._longest(min(tree.max_depth - 1, len(text)))

    def match(self, length: int) -> Match | None:
        """Returns occurrences of the last `length` tokens; None if there are none besides the end of the text.

        The end of the text is among them if the tree counts it.
        """
        run = self._text[len(self._text) - length :]
        branch = self._tree.find(run)
        count = 0 if branch is None else count_of(branch)
        if self._first is None:
            return Match(branch, length, count) if count else None
        least = self._first + length
        ends = [end for end in self._ends if end >= least and self._text[end - length : end] == run]
        count += len(ends)
        return Match(branch, length, count, ends) if count > 1 else None

    def followed(self, match: Match) -> int:
        """Returns how many occurrences of a match something may have followed: all but the end of the text."""
        return match.count - (bool(match.ends) and match.ends[-1] == len(self._text))

    def run(self, match: Match, most: int) -> array[int] | None:
        """Returns up to `most` tokens that followed every occurrence of a match.

        None if a look at one edge does not tell, because a node or the end of the text is reached.
        """
        branch, depth = match.branch, match.depth
        if branch is None or match.ends:
            return None
        tokens, start, end = self._tree.edge(branch)
        return tokens[start + depth : start + min(end, depth + most)] if depth < end else None

    def most_frequent(self, match: Match, least: float) -> tuple[int, Match] | None:
        """Returns the first entry of `following` in less time; None if there is none."""
        found = self._found(match, least)
        ends = self._ends_in_text(match)
        if ends or not found:
            return next(iter(self._with_ends(found, ends, match.depth + 1)), None)
        best = best_token = best_count = -1
        best_branch: Branch = 0
        for token, branch in found:
            count, place = (1, branch) if isinstance(branch, int) else (branch.count, branch.place)
            if count > best_count or (count == best_count and place > best):
                best, best_token, best_count, best_branch = place, token, count, branch
        return best_token, Match(best_branch, match.depth + 1, best_count)

    def following(self, match: Match, least: float) -> list[tuple[int, Match]]:
        """Returns what followed a match: tokens with the longer matches that they make.

        Matches come by falling count, the more recent first among equals. `least` is the wanted count; rarer tokens may
        be among the result.
        """
        return self._with_ends(self._found(match, least), self._ends_in_text(match), match.depth + 1)

    def _found(self, match: Match, least: float) -> Collection[tuple[int, Branch]]:
        depth, branch = match.depth, match.branch
        if branch is None:
            return ()
        if isinstance(branch, Node) and depth == branch.depth:
            # Occurrences outside the tree may make up for a missing count.
            return self._tree.likely_children(branch, least - len(match.ends))
        tokens, start, end = self._tree.edge(branch)
        return ((tokens[start + depth], branch),) if depth < end else ()

    def _ends_in_text(self, match: Match) -> list[int]:
        """Returns where a match continues in the end of the text, at most as deep as the tree.

        Uncounted suffixes are shorter than that, unless the text continues behind the tree's sequence.
        """
        if match.depth >= self._tree.max_depth:
            return []
        return [end for end in match.ends if end < len(self._text)]

    def _with_ends(
        self, found: Collection[tuple[int, Branch]], ends: Sequence[int], depth: int
    ) -> list[tuple[int, Match]]:
        places: dict[int, list[int]] = {}
        for end in ends:
            places.setdefault(self._text[end], []).append(end + 1)
        in_tree: dict[int, Branch] = dict(found)
        each = []
        for token in {**in_tree, **places}:
            branch, own = in_tree.get(token), places.get(token, ())
            count, place = (0, -1) if branch is None else (count_of(branch), _place(branch))
            order = (count + len(own), own[-1] if own else -1, place)
            each.append((order, token, Match(branch, depth, count + len(own), own)))
        each.sort(key=itemgetter(0), reverse=True)
        return [(token, longer) for _, token, longer in each]

    def _longest(self, most: int) -> int:
        """Bisects: if a run occurs, its end occurs too. May miss the last counted suffix of another open sequence."""
        if most and self.match(most) is not None:  # usual while a text is repeated
            return most
        least, most = 0, most - 1
        while least < most:
            middle = (least + most + 1) // 2
            if self.match(middle) is None:
                most = middle - 1
            else:
                least = middle
        return least


def _place(branch: Branch) -> int:
    """Returns where the youngest suffix of a branch begins."""
    return branch.place if isinstance(branch, Node) else branch
