"""The optimiser of both training steps: Muon for matrices, AdamW for all else, one learning-rate curve."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn


def learning_rate(step: int, steps: int, warm_up: int) -> float:
    """Share of the peak rate: linear warm-up, level to the half, then half a cosine down to 1 %."""
    if step < warm_up:
        return (step + 1) / warm_up
    progress = max(0.0, (step - steps / 2) / (steps / 2))
    return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


class Optimiser:
    """Clips, steps, and clears the gradients."""

    def __init__(
        self,
        module: nn.Module,
        peak_rate: float,
        steps: int,
        warm_up: int,
        more: Iterable[nn.Module] = (),
        others_share: float = 1.0,
    ) -> None:
        """peak_rate: of the matrices; all else gets `others_share` of it. more: throwaway modules that train along."""
        self._parameters = [*module.parameters(), *(p for other in more for p in other.parameters())]
        embeddings = {id(child.weight) for child in module.modules() if isinstance(child, nn.Embedding)}
        matrices = [p for p in module.parameters() if p.ndim == 2 and id(p) not in embeddings]
        chosen = {id(p) for p in matrices}
        others = [p for p in self._parameters if id(p) not in chosen]
        self._steps, self._warm_up, self._step = steps, warm_up, 0
        self._optimisers: tuple[tuple[torch.optim.Optimizer, float], ...] = (
            (torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"), peak_rate),
            (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0), peak_rate * others_share),
        )

    def step(self) -> None:
        """One step at the curve's rate, with the gradients' norm clipped to 1."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        share = learning_rate(self._step, self._steps, self._warm_up)
        for optimiser, peak in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = peak * share
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self._step += 1
