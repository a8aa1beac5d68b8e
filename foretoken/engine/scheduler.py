"""Decides which sequences run, in which slots, and over how many KV rows.

Sequences join in order of arrival, when a slot is free and the KV rows for all of their tokens fit. Clients with fewer
running sequences come first, and among the requests of a client those with fewer. If slots or rows are missing and a
waiting client has at least two sequences fewer than another client, the last sequence that joined for the other client
is preempted; so it is among the requests of one client. A sequence waits while another sequence reads the same prefix,
with a slot kept free, and then reuses the rows.

A running sequence needs more rows with every token. When shared rows run out, prefixes in free slots are dropped first,
the oldest first. Then a sequence is preempted, the last that joined for the client with most sequences: it goes to the
head of the queue, and what the KV cache no longer holds of its tokens is read again later. Its text does not change.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from foretoken.core.results import Counter as CounterMetric
from foretoken.core.results import Gauge, Metric, Vector
from foretoken.core.token_tree import common_prefix_len
from foretoken.drafters.base import DraftRequest, Prefix
from foretoken.engine.sequence import Client, Sequence, contained

if TYPE_CHECKING:
    from foretoken.core.records import StepRecord
    from foretoken.drafting.drafting import Drafting
    from foretoken.runner.runner import Runner
    from foretoken.sampling.batch import HistoryTable


class EngineCounts:
    """Counts of one engine.

    `num_drafts` counts trees, one for each sequence and pass. `num_draft_tokens` counts verified nodes, not depths.
    `num_accepted_tokens` excludes the target's own token of every pass, as in vLLM.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self._accepted_at: list[int] = []  # by position from 0

    def begin(self, sequence: Sequence) -> None:
        """Counts a sequence that begins to run."""
        self._counts["vllm:prompt_tokens"] += sequence.num_prompt
        self._counts["vllm:prefix_cache_queries"] += sequence.metrics.num_prefix_queries
        self._counts["vllm:prefix_cache_hits"] += sequence.metrics.num_cached_tokens
        self._counts["foretoken:prefix_cache_lost"] += sequence.metrics.num_prefix_lost

    def add(self, record: StepRecord) -> None:
        """Counts an iteration."""
        is_decoding = False
        for step in record.sequences:
            is_decoding |= not step.ends_prompt
            self._counts["vllm:generation_tokens"] += step.num_emitted
            self._counts["vllm:spec_decode_num_drafts"] += step.num_drafted > 0
            self._counts["vllm:spec_decode_num_draft_tokens"] += step.num_drafted
            self._counts["vllm:spec_decode_num_accepted_tokens"] += step.num_accepted
            self._accepted_at += [0] * (step.tree_depth - len(self._accepted_at))
            for position in range(step.num_accepted):
                self._accepted_at[position] += 1
        self._counts["foretoken:target_passes"] += is_decoding
        self._counts["foretoken:synthetic_passes"] += is_decoding and record.is_synthetic

    def preempt(self) -> None:
        """Counts a preempted sequence."""
        self._counts["vllm:num_preemptions"] += 1

    def end(self, sequence: Sequence) -> None:
        """Counts a finished sequence."""
        self._ended[sequence.finish_reason or ""] += 1

    def metrics(
        self, *, model_name: str, num_running: int, num_waiting: int, kv_usage: float, num_out_of_memory: int
    ) -> list[Metric]:
        """Returns all figures; `kv_usage` is the share of all KV rows that running sequences fill, 0 to 1."""
        labels = {"model_name": model_name, "engine": "0"}
        names = (
            "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits",
            "vllm:num_preemptions", "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens",
            "vllm:spec_decode_num_accepted_tokens", "foretoken:target_passes",
            "foretoken:synthetic_passes", "foretoken:prefix_cache_lost",
        )  # fmt: skip
        return [
            Gauge(name="vllm:num_requests_running", labels=labels, value=num_running),
            Gauge(name="vllm:num_requests_waiting", labels=labels, value=num_waiting),
            Gauge(name="vllm:kv_cache_usage_perc", labels=labels, value=kv_usage),
            *(CounterMetric(name=name, labels=labels, value=self._counts[name]) for name in names),
            CounterMetric(name="foretoken:out_of_memory", labels=labels, value=num_out_of_memory),
            Vector(name="vllm:spec_decode_num_accepted_tokens_per_pos", labels=labels, values=list(self._accepted_at)),
            *(
                CounterMetric(name="vllm:request_success", labels={**labels, "finished_reason": reason}, value=count)
                for reason, count in sorted(self._ended.items())
            ),
        ]


LEAST_PREFIX = 8  # positions; a choice: a shorter prefix is read about as fast as it is copied
# Positions for which a prompt is read in one pass more, so that a state inside it is known. A choice: on CPUs a pass of
# one token takes as long as 45 tokens of a chunk (21 and 234 ms for 1 and 512).
LEAST_JUNCTION = 32


class Held(NamedTuple):
    """The text of the KV rows that a slot holds.

    Attributes:
        tokens: Tokens of the text; the first ones fill the rows.
        length: Number of filled rows; 0 if nobody may reuse them.
        salt: `cache_salt` of the text's request; only requests with the same salt reuse the rows.
    """

    slot: int
    tokens: Seq[int]
    length: int
    salt: str | None


class Taken(NamedTuple):
    """A slot for a sequence, and the cached prefix to reuse, if any."""

    slot: int
    prefix: Prefix | None


class SlotPool:
    """Free slots and the prefixes that they hold, if `keeps_prefixes`."""

    def __init__(self, num_slots: int, *, keeps_prefixes: bool = True) -> None:
        self.num_slots, self.keeps_prefixes = num_slots, keeps_prefixes
        # Empty slots first, then in the order in which slots were given back.
        self._free = [Held(slot, (), 0, None) for slot in range(num_slots)]

    @property
    def free(self) -> list[int]:
        """The free slots, in the order in which they are taken."""
        return [held.slot for held in self._free]

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take_oldest(self) -> int:
        """Takes an empty slot, else the slot that has been free for longest; at least one slot must be free."""
        return self._free.pop(0).slot

    def take(
        self,
        tokens: Seq[int],
        *,
        most: int,
        salt: str | None,
        running: Iterable[Held],
        reusable: Callable[[int, int], int],
    ) -> Taken:
        """Takes a free slot for a text and finds its longest prefix, at most `most` tokens, in any slot.

        At least one slot must be free. `running` are the texts of the slots in use.
        """
        prefix, num_lost = self.longest_prefix(tokens, most=most, salt=salt, running=running, reusable=reusable)
        free = self.free
        if prefix is None or prefix.slot not in free or num_lost > self._free[0].length:
            return Taken(self.take_oldest(), prefix)
        del self._free[free.index(prefix.slot)]
        return Taken(prefix.slot, prefix)

    def longest_prefix(
        self,
        tokens: Seq[int],
        *,
        most: int,
        salt: str | None,
        running: Iterable[Held],
        reusable: Callable[[int, int], int],
    ) -> tuple[Prefix | None, int]:
        """Returns the longest prefix of a text in any slot, and the slot's rows behind it. Arguments: see `take`."""
        prefix, num_lost = None, 0
        for held in (*self._free, *running):
            if held.salt != salt or min(held.length, most) < LEAST_PREFIX:
                continue
            shared = common_prefix_len(held.tokens, tokens)
            length = min(shared - 1, held.length, most)  # the token after them is the same, too
            length = reusable(held.slot, length) if length >= LEAST_PREFIX else 0
            if length >= LEAST_PREFIX and (prefix is None or length > prefix.length):
                prefix, num_lost = Prefix(held.slot, length), held.length - length
        return prefix, num_lost

    def forget_oldest(self, *, but: int | None = None) -> int | None:
        """Drops the prefix of the slot that has been free for longest, other than `but`; returns the slot, or None."""
        for at, held in enumerate(self._free):
            if held.length and held.slot != but:
                del self._free[at]
                self._free.insert(0, Held(held.slot, (), 0, None))
                return held.slot
        return None

    def give_back(self, held: Held) -> None:
        """Frees a slot; the tokens of `held` must not change afterwards."""
        if self.keeps_prefixes and held.length:
            self._free.append(held)
        else:
            self._free.insert(0, Held(held.slot, (), 0, None))


def _parts(client: Client) -> list[Client]:
    """Returns the client itself, and then its part."""
    return [client[: length + 1] for length in range(len(client))]


class Scheduler:
    """Waiting and running sequences; `running`: sequences with a slot, in the order in which they joined."""

    def __init__(
        self, target: Runner, drafting: Drafting, history: HistoryTable, slots: SlotPool, counts: EngineCounts
    ) -> None:
        self._target, self._drafting, self._history, self._slots, self._counts = (
            target, drafting, history, slots, counts,
        )  # fmt: skip
        self._waiting: deque[Sequence] = deque()
        self._has_clients = False  # whether any sequence so far had a client
        self.running: list[Sequence] = []
        if target.cache.states is not None and not slots.keeps_prefixes:
            target.cache.states.snapshots.most_bytes = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self._waiting or self.running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences without a slot."""
        return len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        """Number of slots that no sequence has."""
        return self._slots.num_free

    @property
    def kv_usage(self) -> float:
        """Share of all KV rows that running sequences fill, 0 to 1."""
        return sum(s.num_cached for s in self.running) / self._target.cache.num_rows

    def all(self) -> list[Sequence]:
        """Returns all sequences that wait or run."""
        return [*self._waiting, *self.running]

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self._waiting.append(sequence)
        self._has_clients |= bool(sequence.client)

    def schedule(self) -> None:
        """Gives slots to waiting sequences, and KV rows for a pass over the widest tree to all running ones."""
        while len(self.running) > 1 and not self._fits(self.running):
            self._preempt(self._last_of(()))
        for sequence in self.running if self._target.cache.is_shared else ():
            if sequence.slot is not None:
                self._reserve(sequence.slot, self._rows_of(sequence))
        if not self._waiting:
            return
        if not self._slots.num_free:
            self._make_way()
        in_turn = self._in_turn() if self._slots.num_free else []
        if in_turn and not self._fits([*self.running, in_turn[0]]) and self._make_way():
            in_turn = self._in_turn()
        held_back: list[Sequence] = []  # these stay in the queue
        for sequence in in_turn:
            if self._slots.num_free == len(held_back) or not self._fits([*self.running, *held_back, sequence]):
                break
            if self._is_being_read(sequence):
                held_back.append(sequence)
            else:
                self._waiting.remove(sequence)
                self._join(sequence)

    def forget_rows(self) -> None:
        """Drops all KV rows: preempts running sequences, and drops all prefixes."""
        for sequence in self.running[::-1]:
            self._preempt(sequence)
        while (slot := self._slots.forget_oldest()) is not None:
            self._target.cache.trim(slot, 0)

    def fewest_first(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Returns sequences in the order in which prompts are read: clients with the fewest running sequences first."""
        counts = self._num_running()
        return sorted(sequences, key=lambda sequence: [counts[part] for part in _parts(sequence.client)])

    def remove_finished(self) -> None:
        """Frees the slots of finished sequences."""
        finished = [s for s in self.running if s.finish_reason is not None]
        for sequence in finished:
            # The rows of a failed sequence may be the cause: nobody reuses them.
            self._free_slot(sequence, 0 if sequence.finish_reason == "error" else sequence.num_cached)
            self._counts.end(sequence)
            sequence.slot = None
        if finished:
            self.running = [s for s in self.running if s.finish_reason is None]
        if not self._waiting:
            return
        for sequence in self._waiting:
            if sequence.finish_reason is not None and sequence.has_begun:
                self._counts.end(sequence)
        self._waiting = deque(s for s in self._waiting if s.finish_reason is None)

    def _num_running(self) -> Counter[Client]:
        """Returns the number of running sequences of each client, and of each of its requests."""
        return Counter(part for sequence in self.running for part in _parts(sequence.client))

    def _in_turn(self) -> list[Sequence]:
        """Returns the queue, clients with the fewest sequences that run or wait ahead first, and so their requests."""
        in_turn, counts = [*self._waiting], self._num_running()
        for depth in range(max(map(len, {s.client for s in in_turn}), default=0), 0, -1):  # the last order decides
            ranks = []
            for sequence in in_turn:
                part = sequence.client[:depth]
                ranks.append(counts[part] if len(part) == depth else 0)
                counts[part] += len(part) == depth
            in_turn = [s for _, s in sorted(zip(ranks, in_turn, strict=True), key=itemgetter(0))]
        return in_turn

    def _make_way(self) -> bool:
        """Preempts a sequence if a waiting client or request has at least two running sequences fewer than another."""
        if not self._has_clients:
            return False
        counts = self._num_running()
        fewest: dict[Client, int] = {}  # of the parts that wait, by what they are part of
        for part in {part for client in {s.client for s in self._waiting} for part in _parts(client)}:
            fewest[part[:-1]] = min(counts[part], fewest.get(part[:-1], counts[part]))
        for part, most in counts.most_common():
            if fewest.get(part[:-1], most) + 1 < most:
                self._preempt(self._last_of(part))
                return True
        return False

    def _last_of(self, client: Client) -> Sequence:
        """Returns the running sequence to preempt: the last one of a client's part that has most sequences."""
        counts = self._num_running()
        mine = [s for s in self.running if s.client[: len(client)] == client]
        return max(reversed(mine), key=lambda sequence: [counts[part] for part in _parts(sequence.client)])

    def _fits(self, sequences: Iterable[Sequence]) -> bool:
        return self._target.cache.fits([self._rows_of(s) for s in sequences])

    def _rows_of(self, sequence: Sequence) -> int:
        return min(len(sequence.tokens) - 1 + self._target.max_nodes, self._target.cache.capacity)

    def _preempt(self, sequence: Sequence) -> None:
        self._free_slot(sequence, sequence.num_cached)
        sequence.preempt()
        self.running.remove(sequence)
        self._waiting.appendleft(sequence)
        self._counts.preempt()

    def _free_slot(self, sequence: Sequence, num_kept: int) -> None:
        if sequence.slot is None:
            raise RuntimeError(f"request {sequence.request_id} has no slot: only running sequences leave")
        self._drafting.release(sequence.slot)
        num_kept = num_kept if self._slots.keeps_prefixes else 0
        self._slots.give_back(Held(sequence.slot, list(sequence.tokens), num_kept, sequence.cache_salt))
        self._target.cache.trim(sequence.slot, num_kept)

    def _most_reused(self, sequence: Sequence) -> int:
        """Returns how many rows of others a text may reuse: drafters read the attention of its last tokens."""
        return max(len(sequence.tokens) - max(self._drafting.reads.attention_tokens, 1), 0)

    def _is_being_read(self, sequence: Sequence) -> bool:
        if not self._slots.keeps_prefixes or sequence.wants_prompt_scores:
            return False
        most, salt = self._most_reused(sequence), sequence.cache_salt
        shared = {
            s.slot: min(common_prefix_len(s.tokens, sequence.tokens) - 1, most)
            for s in self.running
            if s.finish_reason is None and s.num_cached < len(s.tokens) - 1 and s.cache_salt == salt
        }
        readers = [s for s in self.running if s.num_cached < shared.get(s.slot, 0)]
        reader = max(readers, key=lambda s: shared[s.slot], default=None)
        if reader is None:
            return False
        coming = shared[reader.slot]
        is_junction = self._target.cache.states is not None and coming < len(reader.tokens) - 1
        least = LEAST_JUNCTION if is_junction else LEAST_PREFIX
        if coming < least:
            return False
        there = [held for held in self._held() if held.slot not in shared]
        prefix, _ = self._slots.longest_prefix(
            sequence.tokens, most=most, salt=salt, running=there, reusable=self._reusable
        )
        if coming - (0 if prefix is None else prefix.length) < least:
            return False
        if is_junction:
            reader.cuts.add(coming + 1)
        return True

    def _reusable(self, slot: int, length: int) -> int:
        """Returns how many of the first `length` positions of a slot neither target nor drafters need to read again."""
        cache, drafting = self._target.cache, self._drafting
        while (least := min(cache.reusable(slot, length), drafting.reusable(slot, length))) < length:
            length = least  # all must accept the shorter prefix
        return length

    def _join(self, sequence: Sequence) -> None:
        is_first = not sequence.has_begun
        sequence.has_begun = True  # before it takes a slot: other threads count free slots, then who waits for one
        taken = self._taken_slot(sequence, is_first=is_first)
        sequence.slot = taken.slot
        self.running.append(sequence)
        contained(sequence, self._begin, taken.prefix, is_first)
        if is_first:
            self._counts.begin(sequence)

    def _taken_slot(self, sequence: Sequence, *, is_first: bool) -> Taken:
        cache, prefix = self._target.cache, None
        if not self._slots.keeps_prefixes or sequence.wants_prompt_scores:  # scores need the logits of all positions
            slot = self._slots.take_oldest()
        else:
            most, salt = self._most_reused(sequence), sequence.cache_salt
            junction = self._junction(sequence)
            slot, prefix = self._slots.take(
                sequence.tokens, most=most, salt=salt, running=self._held(), reusable=self._reusable
            )
            num_lost = max(junction - (0 if prefix is None else prefix.length), 0)
            if num_lost >= LEAST_JUNCTION:
                sequence.cuts.add(junction + 1)
            if is_first:
                sequence.metrics.num_prefix_queries = sequence.num_prompt
                sequence.metrics.num_prefix_lost = num_lost
        cache.trim(slot, prefix.length if prefix is not None and prefix.slot == slot else 0)
        rows = self._rows_of(sequence)
        if prefix is not None and not self._reserve(slot, rows, but=prefix.slot):
            prefix = None  # the rows of the prefix make room for the sequence
        self._reserve(slot, rows)
        return Taken(slot, prefix)

    def _junction(self, sequence: Sequence) -> int:
        """Returns the longest prefix of a text in any slot, if a state were known everywhere; 0 without states."""
        if self._target.cache.states is None:
            return 0
        prefix, _ = self._slots.longest_prefix(
            sequence.tokens, most=self._most_reused(sequence), salt=sequence.cache_salt, running=self._held(),
            reusable=self._drafting.reusable,
        )  # fmt: skip
        return 0 if prefix is None else prefix.length

    def _held(self) -> list[Held]:
        return [
            Held(s.slot, s.tokens, s.num_cached, s.cache_salt)
            for s in self.running
            if s.slot is not None and s.finish_reason is None
        ]

    def _reserve(self, slot: int, count: int, *, but: int | None = None) -> bool:
        """Reserves rows for a slot, if needed those of free slots but `but`; returns whether it succeeded."""
        while not self._target.cache.reserve(slot, count):
            forgotten = self._slots.forget_oldest(but=but)
            if forgotten is None:
                return False
            self._target.cache.trim(forgotten, 0)
        return True

    def _begin(self, sequence: Sequence, prefix: Prefix | None, is_first: bool) -> None:
        slot, params = sequence.slot, sequence.params
        if slot is None:
            raise RuntimeError(f"request {sequence.request_id} has no slot: only running sequences begin")
        if prefix is not None:
            if prefix.slot != slot:
                self._target.copy_prefix(prefix.slot, slot, prefix.length)
            sequence.num_cached = prefix.length
            if is_first:
                sequence.metrics.num_cached_tokens = prefix.length
        self._history.start(slot, sequence.tokens[: sequence.num_prompt], needs_counts=params.has_penalties)
        self._history.append(slot, sequence.output_ids)
        request = DraftRequest(
            request_id=sequence.request_id, prompt=list(sequence.tokens), params=params,
            prediction=sequence.prediction, cache_salt=sequence.cache_salt, prefix=prefix,
        )  # fmt: skip
        self._drafting.begin(slot, request)
