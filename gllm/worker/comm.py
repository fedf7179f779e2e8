"""Tensors between the ranks of a pipeline: torch.distributed, gloo on CPUs and NCCL on GPUs.

Every tensor-parallel rank has the whole hidden states, so each sends to its peer in the next stage.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from gllm.layers.parallel import SINGLE, Parallel
from gllm.worker.embeddings import EmbeddingSource, PixelSource
from gllm.worker.layout import Layout

TIMEOUT = timedelta(minutes=10)  # of one transfer; a dead peer is noticed at once


def connect(layout: Layout, rendezvous: str, device: torch.device) -> Parallel:
    """Join the other ranks; returns when all are there. rendezvous: an init_method URL of torch.distributed."""
    if layout.world_size == 1:
        return SINGLE
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=rendezvous, rank=layout.rank, world_size=layout.world_size, timeout=TIMEOUT
    )
    groups = []
    if layout.tp > 1:
        # Every rank makes every group, in the same order.
        groups = [
            dist.new_group(list(range(s * layout.tp, (s + 1) * layout.tp)), timeout=TIMEOUT) for s in range(layout.pp)
        ]
    return Parallel(
        tp_rank=layout.tp_rank,
        tp_size=layout.tp,
        tp_group=groups[layout.stage] if groups else None,
        pp_rank=layout.stage,
        pp_size=layout.pp,
    )


class Neighbours:
    """The stages before and after this one."""

    def __init__(self, layout: Layout, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        self._before = layout.rank - layout.tp
        self._after = layout.rank + layout.tp
        self._hidden = hidden
        self._dtype = dtype
        self._device = device
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []

    def receive(self, num_tokens: int) -> Callable[[], torch.Tensor]:
        """Post the receive of [num_tokens, hidden]; the call that is returned waits for it."""
        buffer = torch.empty(num_tokens, self._hidden, dtype=self._dtype, device=self._device)
        work = dist.irecv(buffer, self._before)

        def wait() -> torch.Tensor:
            work.wait()
            return buffer

        return wait

    def send(self, hidden: torch.Tensor) -> None:
        """Start to send; the next micro-batch may be computed meanwhile."""
        self._sending = [(work, tensor) for work, tensor in self._sending if not work.is_completed()]
        tensor = hidden.contiguous()
        self._sending.append((dist.isend(tensor, self._after), tensor))


def _first_rank(parallel: Parallel) -> int:
    return dist.get_global_rank(parallel.tp_group, 0)


class SharedEmbeddings:
    """An `EmbeddingSource` for the tensor-parallel ranks of stage 0: the first one has the rows, each of the others
    gets them once."""

    def __init__(self, parallel: Parallel, source: EmbeddingSource | None) -> None:
        """source: where the first rank gathers from; None on the others."""
        self._parallel = parallel
        self._source = source

    def gather(self, request_id: int, index: int, start: int, num_tokens: int, out: torch.Tensor) -> None:
        error: Exception | None = None
        if self._source is not None:
            try:
                self._source.gather(request_id, index, start, num_tokens, out)
            except Exception as caught:
                error = caught  # the others wait for the rows all the same
                out.zero_()
        dist.broadcast(out, _first_rank(self._parallel), group=self._parallel.tp_group)
        if error is not None:
            raise error

    def drop(self, request_id: int) -> None:
        if self._source is not None:
            self._source.drop(request_id)


class SharedPixels:
    """A `PixelSource` for co-located encoding by several tensor-parallel ranks: the first one reads the pixels, so that
    all have them or none."""

    def __init__(self, parallel: Parallel, source: PixelSource | None, device: torch.device) -> None:
        self._parallel = parallel
        self._source = source
        self._device = device

    def pixels(self, request_id: int, index: int) -> torch.Tensor:
        image: torch.Tensor | None = None
        error: Exception | None = None
        if self._source is not None:
            try:
                image = self._source.pixels(request_id, index).to(self._device)
            except Exception as caught:
                error = caught
        size = torch.tensor(image.shape[:2] if image is not None else (0, 0), device=self._device)
        dist.broadcast(size, _first_rank(self._parallel), group=self._parallel.tp_group)
        height, width = size.tolist()
        if not height:
            raise error or LookupError(f"request {request_id}: item {index} has no pixels")
        if image is None:
            image = torch.empty(height, width, 3, dtype=torch.uint8, device=self._device)
        image = image.contiguous()
        dist.broadcast(image, _first_rank(self._parallel), group=self._parallel.tp_group)
        return image
