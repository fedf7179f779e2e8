"""An item's rows in an arena: one tensor [n, hidden], in which an item may lie in several pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rserve.transport.base import Place

if TYPE_CHECKING:
    import torch


def read_rows(arena: torch.Tensor, place: Place, start: int, out: torch.Tensor) -> None:
    """Copy rows `start .. start + len(out) - 1` of the item at `place` into out. Raises ValueError when it has not so
    many."""
    at = 0
    for first, count in place:
        skip = min(start, count)
        start -= skip
        taken = min(count - skip, len(out) - at)
        if taken > 0:
            out[at : at + taken].copy_(arena[first + skip : first + skip + taken])
            at += taken
    if at < len(out):
        raise ValueError(f"{len(out)} rows asked for, the item has {at} from there on")


def write_rows(arena: torch.Tensor, place: Place, rows: torch.Tensor) -> None:
    """Copy all rows of the item to `place`. Raises ValueError when they are not as many as it takes."""
    check_fit(place, rows)
    at = 0
    for first, count in place:
        arena[first : first + count].copy_(rows[at : at + count])
        at += count


def check_fit(place: Place, rows: torch.Tensor) -> None:
    """Raises ValueError."""
    if len(rows) != (room := sum(count for _, count in place)):
        raise ValueError(f"{len(rows)} rows for a place of {room}")
