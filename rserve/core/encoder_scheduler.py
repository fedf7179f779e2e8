"""Algorithm 1 (paper, section 4.2): which items are encoded next, and in what batches.

Requests first come first served; a request's items left to right into a buffer; a buffer with at least C item tokens
is one encode batch; the remainder of the request is flushed. An item is indivisible. C = None is infinity: all items of
a request are one batch. Beyond the paper: items arrive one by one as their pixels are ready, so an idle encoder takes
what is there rather than wait for C; a busy one is given at most one full batch ahead.
"""

from __future__ import annotations

from collections.abc import Callable

from gllm.core.batch import EncodeBatch, ItemRef
from rserve.core.tracker import EmbeddingTracker, Entry, Tag

MAX_OUTSTANDING = 2  # one running, one queued: the encoder never waits for a message
MAX_LOSSES = 3  # encoders that may end at work on one item, before its request is given up


class EncoderScheduler:
    """`is_stuck` tells whether a request (by id) can do nothing until another one makes room."""

    def __init__(self, tracker: EmbeddingTracker, batch_tokens: int | None, is_stuck: Callable[[int], bool]) -> None:
        self._tracker = tracker
        self._batch_tokens = batch_tokens
        self._is_stuck = is_stuck
        self._issued: dict[int, tuple[EncodeBatch, int]] = {}  # batch id -> the batch, its request's generation
        self._outstanding: dict[int, set[int]] = {}  # encoder id -> its batches
        self._num_batches = 0

    # ---- events -------------------------------------------------------------------------------------------------

    def done(self, batch_id: int) -> tuple[ItemRef, ...]:
        """An encode batch came back. Returns the items that were wanted; an unknown batch (of an encoder that was given
        up) returns none."""
        batch, generation = self._issued.pop(batch_id, (None, 0))
        if batch is None:
            return ()
        self._outstanding[batch.encoder_id].discard(batch_id)
        return tuple(ref for ref in batch.items if self._tracker.encoded(ref, generation))

    def lost(self, encoder_id: int) -> tuple[ItemRef, ...]:
        """An encoder is gone: its items wait to be encoded again, those of the batch that it was working on one by one,
        since one of them may be the cause. Returns the items that have ended MAX_LOSSES encoders."""
        fatal = []
        for number, batch_id in enumerate(sorted(self._outstanding.pop(encoder_id, ()))):
            batch, generation = self._issued.pop(batch_id)
            for ref in batch.items:
                if self._tracker.lost(ref, generation, was_running=number == 0) >= MAX_LOSSES:
                    fatal.append(ref)
        return tuple(fatal)

    def num_encoding(self) -> int:
        """Encode batches that are at encoders."""
        return len(self._issued)

    # ---- the decision -------------------------------------------------------------------------------------------

    def next_encode(
        self, encoder_id: int, max_outstanding: int = MAX_OUTSTANDING
    ) -> tuple[EncodeBatch | None, tuple[int, ...]]:
        """The next encode batch for this encoder, or None; and the requests that gave up embeddings for it."""
        outstanding = self._outstanding.setdefault(encoder_id, set())
        if len(outstanding) >= max_outstanding:
            return None, ()
        # An idle encoder takes what is there; a busy one, and one that takes requests whole, only full batches.
        only_full = bool(outstanding) or self._batch_tokens is None
        seq = next(iter(self._tracker.full if only_full else self._tracker.encodable), None)
        if seq is None:
            return None, ()
        entry = self._tracker.by_seq(seq)
        refs = self._buffer(entry)
        surrendered = self._make_room(entry, refs[0].num_tokens)
        refs = self._fitting(refs)
        # First come first served: when there is no room, the room that is made goes to this request.
        return (self._issue(encoder_id, entry, refs) if refs else None), surrendered

    def _buffer(self, entry: Entry) -> list[ItemRef]:
        """The items of the next batch: until C is reached, or no further pixels are there. An item at which an encoder
        ended goes alone."""
        refs: list[ItemRef] = []
        num_tokens = 0
        for index in range(entry.next_encode, len(entry.tags)):
            if entry.tags[index] is Tag.NO_PIXELS:
                break
            if entry.tags[index] is not Tag.PENDING:
                continue  # it stands behind an item that was lost with its encoder
            is_suspect = entry.losses[index] > 0
            if is_suspect and refs:
                break
            item = entry.request.items[index]
            refs.append(ItemRef(entry.request.request_id, index, item.num_tokens))
            num_tokens += item.num_tokens
            if is_suspect or (self._batch_tokens is not None and num_tokens >= self._batch_tokens):
                break
        return refs

    def _fitting(self, refs: list[ItemRef]) -> list[ItemRef]:
        """As many of the items, from the left, as there is room for."""
        room = self._tracker.pool.capacity - self._tracker.pool.used
        fitting = []
        for ref in refs:
            room -= ref.num_tokens
            if room < 0:
                break
            fitting.append(ref)
        return fitting

    def _make_room(self, entry: Entry, num_tokens: int) -> tuple[int, ...]:
        """Younger requests that can do nothing give up what they hold, the youngest first, so that the oldest always
        gets on. Returns their ids."""
        surrendered = []
        for seq in list(reversed(self._tracker.holders)):
            if seq <= entry.seq or self._tracker.pool.fits(num_tokens):
                break
            holder = self._tracker.by_seq(seq)
            if self._is_stuck(holder.request.request_id):
                self._tracker.surrender(holder)
                surrendered.append(holder.request.request_id)
        return tuple(surrendered)

    def _issue(self, encoder_id: int, entry: Entry, refs: list[ItemRef]) -> EncodeBatch:
        self._tracker.encoding(entry, refs)
        batch = EncodeBatch(self._num_batches, encoder_id, tuple(refs))
        self._num_batches += 1
        self._issued[batch.batch_id] = (batch, entry.generation)
        self._outstanding[encoder_id].add(batch.batch_id)
        return batch
