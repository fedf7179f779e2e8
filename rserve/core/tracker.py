"""The embedding tracker (paper, section 4.1): one entry a request, a readiness tag for each item, updated in place.

Text is ready at once. An item is ready once it is encoded; only the contiguous ready prefix of a request counts. As
soon as a span was fed to prefill its embedding is released.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gllm.core.batch import ItemRef
from gllm.core.embeddings import EmbeddingPool, EmbeddingStats
from gllm.core.ordered import OrderedIds
from gllm.core.readiness import check_items_fit
from gllm.core.request import Request


class Tag(Enum):
    """Readiness of one item's embeddings."""

    NO_PIXELS = "no pixels"  # fetched, decoded, resized: not yet
    PENDING = "pending"  # can be encoded
    ENCODING = "encoding"  # at an encoder, room for its embeddings is reserved
    READY = "ready"  # held, waits for prefill
    RELEASED = "released"  # fed to prefill


@dataclass(slots=True, eq=False)
class Entry:
    """Items of one request, by index. `losses`: how many encoders ended while they worked on the item; `next_encode`:
    the first that no encoder has or had; `first_unready`: the end of the contiguous ready prefix; `first_held`: the
    first not released. `generation` counts preemptions: an item that was at an encoder when its request was preempted
    comes back to nobody."""

    request: Request
    seq: int
    tags: list[Tag]
    losses: list[int]
    next_encode: int = 0
    first_unready: int = 0
    first_held: int = 0
    held: int = 0
    generation: int = 0
    is_wanted: bool = True


class EmbeddingTracker:
    """Counts the room of embeddings (in tokens) in `pool`, names what is released, and keeps lines in order of arrival:
    `encodable` (requests whose next item can go to an encoder), `full` (those that have a full encode batch: C tokens,
    or all that is left) and `holders` (requests with READY items)."""

    def __init__(self, pool: EmbeddingPool, intra_request_overlap: bool, batch_tokens: int | None) -> None:
        self.pool = pool
        self.held = 0  # tokens READY and not released
        self.peak_held = 0
        self.encodable = OrderedIds()
        self.full = OrderedIds()
        self.holders = OrderedIds()
        self._batch_tokens = batch_tokens
        self._overlap = intra_request_overlap
        self._entries: dict[int, Entry] = {}
        self._by_seq: dict[int, Entry] = {}
        self._released: list[ItemRef] = []

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entries

    def by_seq(self, seq: int) -> Entry:
        return self._by_seq[seq]

    # ---- the scheduler's questions (gllm.core.readiness.Readiness) ------------------------------------------------

    def add(self, request: Request, seq: int) -> None:
        check_items_fit(request, self.pool.capacity)
        count = len(request.items)
        entry = Entry(request, seq, [Tag.NO_PIXELS] * count, [0] * count)
        self._entries[request.request_id] = self._by_seq[seq] = entry

    def ready_end(self, request_id: int, num_tokens: int) -> int:
        entry = self._entries[request_id]
        items = entry.request.items
        if entry.first_unready == len(items):
            return num_tokens
        if not self._overlap and entry.request.num_item_tokens <= self.pool.capacity:
            return 0  # a request that could never be held whole is overlapped all the same, or it would wait for ever
        return items[entry.first_unready].offset

    def is_coming(self, request_id: int) -> bool:
        return Tag.ENCODING in self._entries[request_id].tags

    def waits_for_pixels(self, request_id: int) -> bool:
        entry = self._entries[request_id]
        return entry.first_unready < len(entry.tags) and entry.tags[entry.first_unready] is Tag.NO_PIXELS

    def room_end(self, request_id: int, end: int) -> int:
        return end  # room was reserved when the items went to an encoder

    def take(self, request_id: int, start: int, end: int) -> tuple[ItemRef, ...]:
        return ()

    def fed(self, request_id: int, end: int) -> None:
        entry = self._entries[request_id]
        items = entry.request.items
        while entry.first_held < len(items) and items[entry.first_held].end <= end:
            self._release(entry, entry.first_held, Tag.RELEASED)
            entry.first_held += 1
        self._line_up(entry)

    def reset(self, request_id: int) -> None:
        entry = self._entries[request_id]
        for index, tag in enumerate(entry.tags):
            if tag is Tag.READY:
                self._release(entry, index, Tag.PENDING)
            elif tag is not Tag.NO_PIXELS:
                entry.tags[index] = Tag.PENDING
        entry.next_encode = entry.first_unready = entry.first_held = 0
        entry.generation += 1
        self._line_up(entry)

    def remove(self, request_id: int) -> None:
        self.reset(request_id)
        entry = self._entries.pop(request_id)
        del self._by_seq[entry.seq]
        self.encodable.remove(entry.seq)
        self.full.remove(entry.seq)

    def stats(self) -> EmbeddingStats:
        return EmbeddingStats(self.held, self.peak_held, self.pool.used - self.held, self.pool.capacity)

    # ---- progress of items ----------------------------------------------------------------------------------------

    def pixels_ready(self, request_id: int, index: int) -> None:
        """The pixels of an item are there."""
        entry = self._entries[request_id]
        if entry.tags[index] is Tag.NO_PIXELS:
            entry.tags[index] = Tag.PENDING
            self._line_up(entry)

    def encoding(self, entry: Entry, refs: list[ItemRef]) -> None:
        """The items go to an encoder; room for their embeddings is reserved."""
        for ref in refs:
            self.pool.reserve(ref.num_tokens)
            entry.tags[ref.index] = Tag.ENCODING
        self._line_up(entry)

    def encoded(self, ref: ItemRef, generation: int) -> bool:
        """The item's embeddings are there: tag them. False (and the room is released) when nobody wants them."""
        entry = self._entries.get(ref.request_id)
        if entry is None or entry.generation != generation:
            self.pool.release(ref.num_tokens)
            return False
        entry.tags[ref.index] = Tag.READY
        entry.held += ref.num_tokens
        self.held += ref.num_tokens
        self.peak_held = max(self.peak_held, self.held)
        while entry.first_unready < len(entry.tags) and entry.tags[entry.first_unready] in (Tag.READY, Tag.RELEASED):
            entry.first_unready += 1
        self._line_up(entry)
        return True

    def lost(self, ref: ItemRef, generation: int, was_running: bool) -> int:
        """The encoder died with the item, which it was working on or not: it has to be encoded again. Returns how many
        encoders died at work on it."""
        self.pool.release(ref.num_tokens)
        entry = self._entries.get(ref.request_id)
        if entry is None:
            return 0
        entry.losses[ref.index] += was_running
        if entry.generation == generation:
            entry.tags[ref.index] = Tag.PENDING
            entry.next_encode = min(entry.next_encode, ref.index)
            self._line_up(entry)
        return entry.losses[ref.index]

    def surrender(self, entry: Entry) -> None:
        """Give up the embeddings of this request that wait for prefill; they are encoded again later."""
        for index, tag in enumerate(entry.tags):
            if tag is Tag.READY:
                self._release(entry, index, Tag.PENDING)
                entry.next_encode = min(entry.next_encode, index)
                entry.first_unready = min(entry.first_unready, index)
        self._line_up(entry)

    def stop(self, request_id: int) -> None:
        """The request was aborted: nothing more of it is encoded. Micro-batches in flight may still gather."""
        entry = self._entries[request_id]
        entry.is_wanted = False
        self._line_up(entry)

    def take_released(self) -> tuple[ItemRef, ...]:
        """Items whose embeddings are no longer needed; each is named once, for those who hold the bytes."""
        released, self._released = tuple(self._released), []
        return released

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _release(self, entry: Entry, index: int, tag: Tag) -> None:
        num_tokens = entry.request.items[index].num_tokens
        entry.tags[index] = tag
        entry.held -= num_tokens
        self.held -= num_tokens
        self.pool.release(num_tokens)
        self._released.append(ItemRef(entry.request.request_id, index, num_tokens))

    def _line_up(self, entry: Entry) -> None:
        tags = entry.tags
        while entry.next_encode < len(tags) and tags[entry.next_encode] not in (Tag.PENDING, Tag.NO_PIXELS):
            entry.next_encode += 1
        can_encode = entry.is_wanted and entry.next_encode < len(tags) and tags[entry.next_encode] is Tag.PENDING
        self.encodable.set(entry.seq, can_encode)
        self.full.set(entry.seq, can_encode and self._has_full_batch(entry))
        self.holders.set(entry.seq, entry.held > 0)

    def _has_full_batch(self, entry: Entry) -> bool:
        num_tokens = 0
        for index in range(entry.next_encode, len(entry.tags)):
            if entry.tags[index] is Tag.NO_PIXELS:
                return False
            if entry.tags[index] is Tag.PENDING:
                num_tokens += entry.request.items[index].num_tokens
                if self._batch_tokens is not None and num_tokens >= self._batch_tokens:
                    return True
        return True
