"""Row by row work cut into blocks that stay in a CPU's cache; a GPU takes all rows at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gllm.layers.packed import padded_rows

# Measured with bfloat16 and hidden 512: a feed-forward layer over 4,096 rows takes 1.6 x as long in one piece as in
# blocks of 512, for its intermediate results are then written to memory, each time to pages that are new.
CPU_ROWS = 512


def row_blocks(num_rows: int, device: torch.device) -> list[slice]:
    """Consecutive slices that cover `num_rows` rows, of nearly equal size; all but the last one have a size that
    products are made with."""
    if device.type != "cpu" or num_rows <= CPU_ROWS:
        return [slice(0, num_rows)]
    size = padded_rows(-(-num_rows // -(-num_rows // CPU_ROWS)))
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def join(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """The results of the blocks as one tensor, without a copy when there is one block."""
    whole = list(parts)
    return whole[0] if len(whole) == 1 else torch.cat(whole)
