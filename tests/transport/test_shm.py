"""The arena: accounting over random histories, and rows that arrive as they were sent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rserve.embeddings import ReceivedEmbeddings
from rserve.transport.extents import Extents
from rserve.transport.shm import ShmReceiver, ShmSender


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60))
def test_no_row_is_handed_out_twice_and_all_can_be_used(num_rows, steps):
    extents, places = Extents(num_rows), []
    for allocate, number in steps:
        if allocate and number <= extents.num_free:
            places.append(extents.allocate(number))
            assert sum(count for _, count in places[-1]) == number
        elif not allocate and places:
            extents.free(places.pop(number % len(places)))
        rows = [row for place in places for start, count in place for row in range(start, start + count)]
        assert len(rows) == len(set(rows)) == num_rows - extents.num_free
        assert all(0 <= row < num_rows for row in rows)
    for place in places:
        extents.free(place)
    assert extents.allocate(num_rows) == ((0, num_rows),)


def test_freeing_twice_and_taking_too_much_are_refused():
    extents = Extents(10)
    place = extents.allocate(4)
    extents.free(place)
    with pytest.raises(ValueError, match="not allocated"):
        extents.free(place)
    with pytest.raises(ValueError, match="11 rows wanted, 10 free"):
        extents.allocate(11)


@pytest.fixture
def ends(tmp_path):
    receiver = ShmReceiver(tmp_path / "arena", 12, 5, torch.bfloat16)
    sender = ShmSender(tmp_path / "arena", 12, 5, torch.bfloat16)
    yield receiver, sender
    sender.close()
    receiver.close()
    assert not (tmp_path / "arena").exists()


def test_rows_of_a_split_item_arrive_in_order(ends):
    receiver, sender = ends
    first, gap, _last = (receiver.allocate(4) for _ in range(3))
    receiver.free(first)
    receiver.free(_last)
    place = receiver.allocate(7)
    assert len(place) == 2
    rows = torch.randn(7, 5).bfloat16()
    sender.write(place, rows)
    for start in range(7):
        for count in range(1, 8 - start):
            out = torch.zeros(count, 5, dtype=torch.bfloat16)
            receiver.read(place, start, out)
            assert torch.equal(out, rows[start : start + count])
    with pytest.raises(ValueError, match="3 rows asked for, the item has 2"):
        receiver.read(place, 5, torch.zeros(3, 5, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="6 rows for a place of 7"):
        sender.write(place, rows[:6])
    assert receiver.num_rows_used == 7 + sum(count for _, count in gap)


def test_a_received_item_can_be_gathered_until_it_is_released(ends):
    receiver, sender = ends
    embeddings = ReceivedEmbeddings(receiver)
    place = receiver.allocate(3)
    rows = torch.randn(3, 5).bfloat16()
    sender.write(place, rows)
    out = torch.zeros(2, 5, dtype=torch.bfloat16)
    with pytest.raises(LookupError):
        embeddings.gather(1, 0, 1, 2, out)
    embeddings.bind(1, 0, place)
    embeddings.gather(1, 0, 1, 2, out)
    assert torch.equal(out, rows[1:])
    embeddings.release(1, 0)
    assert receiver.num_rows_used == len(embeddings) == 0
