"""RServe's own numbers, taken from the engine's configuration. Values only; standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RServeConfig:
    """num_encoders E; encoder_batch_tokens C of Algorithm 1, None: a request's items are one batch (C = infinity);
    embedding_capacity: item tokens whose embeddings may be allocated at once; min_chunk_tokens: floor of a prefill
    chunk while later items of its request are still to come (1: none); elastic_encode: stage 0 takes encode batches
    while it has nothing else to do."""

    num_encoders: int = 1
    encoder_batch_tokens: int | None = 1024
    intra_request_overlap: bool = True
    inter_request_batching: bool = True
    embedding_capacity: int = 65536
    min_chunk_tokens: int = 1
    elastic_encode: bool = False
