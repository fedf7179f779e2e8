"""Two tensor-parallel ranks as two processes over gloo give the tokens and logits of one process."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.multiprocessing as mp

from gllm.layers.parallel import Parallel
from gllm.worker.runner import StageRunner
from tests.models.checkpoints import make_prompt
from tests.worker.harness import Harness

LAYOUTS = ((12,), (5, (10, 6), 3), (3, (18, 22), 4, (4, 8), 2))
NUM_BLOCKS, NUM_OUTPUTS = 64, 5


def answers(checkpoint: Path, parallel: Parallel) -> tuple[list[list[int]], torch.Tensor]:
    """Output tokens of all prompts together, and every row of logits on the way."""
    runner = StageRunner.build(checkpoint, num_blocks=NUM_BLOCKS, page_size=8, parallel=parallel, with_vision=True)
    rows = []
    plain = runner.model.logits
    runner.model.logits = lambda hidden: (rows.append(plain(hidden)), rows[-1])[1]
    prompts = [make_prompt(layout, seed) for seed, layout in enumerate(LAYOUTS)]
    requests = Harness([runner], NUM_BLOCKS).run(prompts, NUM_OUTPUTS, 32)
    return [request.output for request in requests], torch.cat(rows)


def run_rank(rank: int, checkpoint: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    parallel = Parallel(tp_rank=rank, tp_size=2, tp_group=torch.distributed.group.WORLD)
    torch.save(answers(checkpoint, parallel), folder / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_equal_one(untied, tmp_path):
    tokens, logits = answers(untied, Parallel())
    mp.spawn(run_rank, (untied, tmp_path), nprocs=2)
    for rank in range(2):
        theirs, rows = torch.load(tmp_path / f"rank{rank}.pt")
        assert theirs == tokens
        torch.testing.assert_close(rows, logits, atol=1e-4, rtol=0)
