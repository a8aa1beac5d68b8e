"""Faults of other engines, planted in our own code: see `test_recurrent_faults.py`."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from foretoken.core.passes import Pass
from foretoken.decoder.recurrent_states import _EMPTY, LayerState, PathState, RecurrentStates, Start, _At, _LastPass
from foretoken.decoder.slot_cache import SlotCache
from foretoken.drafters.base import Prefix
from foretoken.engine.scheduler import Scheduler, SlotPool
from foretoken.engine.sequence import Sequence as Decoded
from foretoken.models.level_states import LayerStates


class Mutant(NamedTuple):
    """A fault, the test that must notice it, and what that test says.

    Attributes:
        plant: Replaces a part of our code.
        scenario: Name of the test.
        sign: Pattern of the failed assertion.
        more: Further arguments of the test.
    """

    plant: Callable[[pytest.MonkeyPatch], None]
    scenario: str
    sign: str = "another text than the target's"
    more: dict[str, Any] = {}  # noqa: RUF012 - never changed


class Commit(NamedTuple):
    """One slot in a commit.

    Attributes:
        before: The committed state before the pass.
        last: The last pass of the slot.
        path: Accepted nodes.
        counts: Nodes of all slots of the commit.
    """

    before: Any
    last: _LastPass
    path: Sequence[int]
    counts: Sequence[int]


def commits(change: Callable[[Commit], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A commit that keeps another state."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        own = RecurrentStates.commit

        def wrong(
            self: RecurrentStates, slots: Sequence[int], lengths: Sequence[int], nodes: Sequence[Sequence[int]]
        ) -> None:
            before = [(self._committed[slot].state, self._last[slot]) for slot in slots]
            own(self, slots, lengths, nodes)
            counts = [len(last.parents) for _, last in before if last is not None]
            for slot, (state, last), (_, *path) in zip(slots, before, nodes, strict=True):
                assert last is not None
                changed = change(Commit(state, last, path, counts))
                self._committed[slot] = self._committed[slot]._replace(state=changed)

        monkeypatch.setattr(RecurrentStates, "commit", wrong)

    return plant


def last_node(commit: Commit) -> Any:
    """As if every drafted token had been accepted."""
    return commit.last.after(len(commit.last.parents) - 1)


def stale_window(commit: Commit) -> Any:
    """The recurrent state is rolled back, the window of the convolution is not. Lean: inputs of wrong siblings."""
    right, wrong = commit.last.after(commit.path[-1] if commit.path else 0), last_node(commit)
    if isinstance(right, PathState):
        return right._replace(rows=[row._replace(place=max(0, row.place - 1)) for row in right.rows])
    return LayerStates({layer: LayerState(wrong[layer].window, each.recurrent) for layer, each in right.items()})


def before_the_pass(commit: Commit) -> Any:
    """If nothing was accepted, the root is lost too."""
    return commit.last.after(commit.path[-1]) if commit.path else commit.before


def one_too_few(commit: Commit) -> Any:
    """The state before the last accepted token."""
    return commit.last.after(commit.path[-2] if len(commit.path) > 1 else 0)


def of_padded_rows(commit: Commit) -> Any:
    """Sequences begin at multiples of the widest tree, as if narrower ones were padded."""
    counts, first = commit.counts, commit.last.first
    row = next((row for row in range(len(counts)) if sum(counts[:row]) == first), 0)
    node = row * max(counts) + (commit.path[-1] if commit.path else 0)
    return commit.last.states.after(min(node, sum(counts) - 1))


def without_drafts_from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass without drafts begins behind the root of the pass before, whatever was accepted there."""
    commit, begin = RecurrentStates.commit, RecurrentStates.begin
    roots: dict[int, Any] = {}

    def note(self: RecurrentStates, slots: Any, lengths: Any, nodes: Any) -> None:
        for slot in slots:
            last = self._last[slot]
            assert last is not None
            roots[slot] = last.after(0)
        commit(self, slots, lengths, nodes)

    def wrong(self: RecurrentStates, work: Pass) -> list[Start]:
        return [
            Start(roots[slot]) if end - start == 1 and slot in roots else each
            for slot, (start, end), each in zip(work.slots, pairwise(work.offsets), begin(self, work), strict=True)
        ]

    monkeypatch.setattr(RecurrentStates, "commit", note)
    monkeypatch.setattr(RecurrentStates, "begin", wrong)


def kept_by_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text without a prefix begins from what its slot holds of the text before."""
    own, free, used = RecurrentStates._at, Scheduler._free_slot, set[int | None]()

    def wrong(self: RecurrentStates, slot: int, length: int) -> _At:
        return self._committed[slot] if length == 0 and slot in used else own(self, slot, length)

    def noted(self: Scheduler, sequence: Decoded, num_kept: int) -> None:
        used.add(sequence.slot)
        free(self, sequence, num_kept)

    monkeypatch.setattr(RecurrentStates, "_at", wrong)
    monkeypatch.setattr(Scheduler, "_free_slot", noted)


def chunks_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second chunk of a prompt of the engine begins without a state."""
    own, add, served = RecurrentStates._at, Scheduler.add, list[Decoded]()

    def wrong(self: RecurrentStates, slot: int, length: int) -> _At:
        last = self._last[slot]
        is_second = bool(served) and length > 0 and last is not None and last.length == 0
        return _EMPTY if is_second else own(self, slot, length)

    def noted(self: Scheduler, sequence: Decoded) -> None:
        served.append(sequence)  # what ran before was the self-test
        add(self, sequence)

    monkeypatch.setattr(RecurrentStates, "_at", wrong)
    monkeypatch.setattr(Scheduler, "add", noted)


def taken_for_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a chunk of a prompt, a row of several tokens is taken for a prompt and begins without a state."""
    own = RecurrentStates.begin

    def wrong(self: RecurrentStates, work: Pass) -> list[Start]:
        num_logits = len(work.tokens) if work.logit_rows is None else len(work.logit_rows)
        is_mixed = 1 < len(work.slots) < num_logits < len(work.tokens)
        return [
            Start(None) if is_mixed and end - start > 1 else each
            for (start, end), each in zip(pairwise(work.offsets), own(self, work), strict=True)
        ]

    monkeypatch.setattr(RecurrentStates, "begin", wrong)


def hits_without_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values decide how much of a prefix is reused."""
    monkeypatch.setattr(SlotCache, "reusable", lambda self, slot, length: length)


def hits_with_an_empty_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, and a state that is not there is zero."""
    hits_without_a_state(monkeypatch)
    own = RecurrentStates._at

    def wrong(self: RecurrentStates, slot: int, length: int) -> _At:
        try:
            return own(self, slot, length)
        except Exception:  # noqa: BLE001 - whatever it is
            return _At(length, None)

    monkeypatch.setattr(RecurrentStates, "_at", wrong)


def hits_with_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever begins with a prefix gets the state of a slot that was not asked for."""
    own = Scheduler._begin

    def wrong(self: Scheduler, sequence: Decoded, prefix: Prefix | None, is_first: bool) -> None:
        own(self, sequence, prefix, is_first)
        states, slot = self._target.cache.states, sequence.slot
        if prefix is not None and states is not None and slot is not None:
            other = states._committed[(slot + 1) % len(states._committed)]
            states._committed[slot], states._last[slot] = _At(prefix.length, other.state), None

    monkeypatch.setattr(Scheduler, "_begin", wrong)


def snapshots_one_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state before the last token of a prompt has absorbed that token."""
    own = RecurrentStates.copy

    def wrong(self: RecurrentStates, source: int, slot: int, length: int) -> None:
        further = self._at(source, length + 1)
        own(self, source, slot, length)
        self._committed[slot] = _At(length, further.state)

    monkeypatch.setattr(RecurrentStates, "copy", wrong)


def commits_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the target accepts behind a stop token stays in the state."""
    monkeypatch.setattr(Decoded, "until_stop", lambda self, path, tokens: path)


def drafts_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft may be longer than what the context has room for, and so may its text."""
    emit = Decoded.emit

    def wrong(self: Decoded, tokens: Sequence[int]) -> int:
        self._max_len += 1 if len(tokens) > 1 else 0
        return emit(self, tokens)

    monkeypatch.setattr(Decoded, "emit", wrong)


def prefixes_of_old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write to the weights drops no prefix."""
    monkeypatch.setattr(Scheduler, "forget_rows", lambda self: None)


def shared_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Salts are not looked at."""
    own = SlotPool.longest_prefix

    def wrong(self: SlotPool, tokens: Any, *, salt: str | None, running: Any, **more: Any) -> Any:
        free, self._free = self._free, [held._replace(salt=salt) for held in self._free]
        try:
            return own(self, tokens, salt=salt, running=[held._replace(salt=salt) for held in running], **more)
        finally:
            self._free = free

    monkeypatch.setattr(SlotPool, "longest_prefix", wrong)


_REJECTED = "test_the_state_of_a_rejected_token_is_gone"
_NAN = "not finite"
MUTANTS: dict[str, Mutant] = {
    "all rejected, and the state of the last node stays": Mutant(
        commits(last_node), _REJECTED, more={"script": "all rejected"}
    ),
    "the window is not rolled back": Mutant(
        commits(stale_window), _REJECTED, more={"script": "fewer accepted than a window holds"}
    ),
    "a step without drafts reads an old state": Mutant(
        without_drafts_from_the_root, _REJECTED, more={"script": "a step without drafts after accepted ones"}
    ),
    "all rejected, and the root is lost": Mutant(
        commits(before_the_pass), _REJECTED, more={"script": "all rejected, then nothing drafted"}
    ),
    "one accepted token too few": Mutant(commits(one_too_few), "test_structured_output"),
    "a stream with the state of a rejected token": Mutant(commits(last_node), "test_streams"),
    "a server's stream with it": Mutant(commits(last_node), "test_streams_of_the_server"),
    "a batch in parts with it": Mutant(commits(last_node), "test_a_batch_that_runs_in_parts"),
    "rows as if padded": Mutant(commits(of_padded_rows), "test_sequences_of_other_widths_in_a_pass"),
    "a hit with another state": Mutant(hits_with_another_state, "test_a_prefix_hit_has_the_state_of_its_position"),
    "a later hit with another state": Mutant(hits_with_another_state, "test_later_hits_are_of_the_same_text"),
    "a running text's state of another slot": Mutant(
        hits_with_another_state, "test_a_text_that_begins_with_a_running_one"
    ),
    "a hit without a state": Mutant(
        hits_without_a_state, "test_a_prefix_without_a_state_is_read_again", "has no recurrent state behind 1?9 tokens"
    ),
    "a hit with an empty state": Mutant(hits_with_an_empty_state, "test_a_prefix_without_a_state_is_read_again"),
    "a state behind the stop token": Mutant(
        commits_past_the_end, "test_a_text_that_ends_inside_a_draft", "other hits", {"has_stop": True}
    ),
    "a snapshot one token too far": Mutant(snapshots_one_too_far, "test_completions_of_one_prompt"),
    "a slot that keeps its state after an abort": Mutant(kept_by_the_slot, "test_a_slot_goes_on_after_an_abort", _NAN),
    "a slot that keeps the state of half a prompt": Mutant(kept_by_the_slot, "test_a_prompt_that_was_half_read", _NAN),
    "a slot that keeps its state": Mutant(kept_by_the_slot, "test_slots_are_used_again", _NAN),
    "a text read again on its old state": Mutant(kept_by_the_slot, "test_all_are_preempted_and_read_again"),
    "a preempted text resumed on an old state": Mutant(kept_by_the_slot, "test_a_preempted_request_goes_on", _NAN),
    "chunks that begin from zero": Mutant(chunks_from_zero, "test_chunks_of_prompts", more={"budget": 7}),
    "trees taken for prompts": Mutant(taken_for_prompts, "test_decode_rows_beside_chunks", more={"budget": 12}),
    "a text longer than the context": Mutant(drafts_past_the_end, "test_a_draft_that_ends_at_the_context"),
    "states of old weights": Mutant(prefixes_of_old_weights, "test_states_of_old_weights_are_not_used"),
    "states for every salt": Mutant(shared_by_all, "test_texts_with_another_salt_share_no_state", "other hits"),
}  # fmt: skip
