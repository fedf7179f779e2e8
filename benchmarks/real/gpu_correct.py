"""What `gpu_check` proves: each attention backend against `sdpa`, and our tokens and logits against transformers'.

The prompts and the little engine that runs them are those of the tests: this is their part that needs a GPU.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from benchmarks.real.conformance import LONG, PAGE_SIZES, SHORT, TOLERANCE, difference, every_pair, setting_of
from gllm.config import DEMO_CHECKPOINT
from gllm.errors import StartupError
from gllm.layers.attention.base import BACKENDS, load_backend
from gllm.worker.runner import StageRunner

FLASH_PAGE = 256  # the smallest that flash-attn 2 reads
# (text tokens or an image's (h, w) in patches): no image, one, four of odd sizes.
PROMPTS: dict[str, tuple[Any, ...]] = {
    "text": (37,),
    "one image": (5, (10, 6), 9),
    "four images": (3, (18, 22), 4, (4, 8), 2, (14, 2), 1, (8, 12), 6),
}
NUM_OUTPUTS = 8
# A bf16 run of ours may differ from transformers' float32 by this much more than its own bf16 run does.
SPREAD = 1.5


class Failed(Exception):
    """A check found something wrong; `figures` says what was measured until then."""

    def __init__(self, reason: str, figures: dict[str, Any]) -> None:
        super().__init__(reason)
        self.figures = figures


class Unable(Exception):
    """A check cannot run here; the message says why."""


def device_of(tiny: bool) -> torch.device:
    return torch.device("cpu" if tiny else "cuda")


def conformance(backend: str, tiny: bool) -> dict[str, Any]:
    """Every pair of head size, group and page size in bf16, a third of them in float32 (whose kernels take long to
    compile)."""
    device = device_of(tiny)
    pages = (FLASH_PAGE,) if backend == "flash" else PAGE_SIZES
    worst: dict[str, float] = {}
    for dtype in (torch.float32,) if tiny else (torch.bfloat16, torch.float32):
        cases = every_pair(pages)[:: 6 if tiny else 3 if dtype == torch.float32 else 1]
        if backend == "flash" and dtype == torch.float32 and not tiny:
            continue  # flash-attn takes 16-bit values alone
        errors = []
        for case in cases:
            try:
                chosen = load_backend(backend, setting_of(case, dtype, device))
            except ValueError as error:
                raise Unable(str(error)) from None
            errors += [difference(chosen, case, mix, dtype, device) for mix in ((SHORT,) if tiny else (SHORT, LONG))]
        name = str(dtype).removeprefix("torch.")
        worst[name] = max(errors)
        if worst[name] > TOLERANCE[dtype]:
            raise Failed(f"{worst[name]:.2g} from sdpa in {name}, {TOLERANCE[dtype]:g} is allowed", worst)
    return {"largest_difference": worst}


# ---- against transformers -------------------------------------------------------------------------------------------


class Reference:
    """transformers on the demo checkpoint."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import Qwen2_5_VLForConditionalGeneration

        loaded = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            DEMO_CHECKPOINT, dtype=dtype, attn_implementation="sdpa"
        )
        self.model = loaded.to(device).eval()

    def inputs(self, prompt: Any, forced: list[int]) -> dict[str, torch.Tensor]:
        """Of a forward pass over the prompt and output tokens that are given."""
        from tests.models.checkpoints import pixel_values

        ids = torch.tensor([[*prompt.token_ids, *forced]], device=self.model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if prompt.images:
            pixels, grids = pixel_values(prompt)
            inputs["pixel_values"] = pixels.to(self.model.device, self.model.dtype)
            inputs["image_grid_thw"] = grids.to(self.model.device)
            # Without it positions silently fall back to one axis.
            inputs["mm_token_type_ids"] = (ids == self.model.config.image_token_id).int()
        return inputs

    @torch.no_grad()
    def greedy(self, prompt: Any) -> list[int]:
        out = self.model.generate(
            **self.inputs(prompt, []), do_sample=False, max_new_tokens=NUM_OUTPUTS, min_new_tokens=NUM_OUTPUTS,
            eos_token_id=None,
        )  # fmt: skip
        return out[0, len(prompt.token_ids) :].tolist()

    @torch.no_grad()
    def logits(self, prompt: Any, forced: list[int]) -> torch.Tensor:
        """[outputs, vocabulary] in float32: what each of the forced tokens would have been chosen from."""
        out = self.model(**self.inputs(prompt, forced[:-1]), logits_to_keep=len(forced), use_cache=False)
        return out.logits[0].float().cpu()


def our_logits(runner: StageRunner, prompt: Any, forced: list[int]) -> torch.Tensor:
    """The same of ours, [outputs, vocabulary], the prompt in two chunks."""
    from tests.worker.harness import Harness

    rows: list[torch.Tensor] = []
    plain = runner.model.logits

    def keep(hidden: torch.Tensor) -> torch.Tensor:
        out = plain(hidden)
        rows.extend(out.float().cpu())
        return out

    runner.model.logits = keep
    harness = Harness([runner], runner.cache.num_blocks)
    request = harness.start(prompt)
    half = len(prompt.token_ids) // 2
    harness.step([(request, half)])
    harness.step([(request, len(prompt.token_ids) - half)])
    for token in forced[:-1]:
        request.known[-1] = token
        harness.step([(request, 1)])
    harness.finish(request)
    del runner.model.logits
    runner.forget([request.request_id])
    return torch.stack(rows)


def _prompts() -> dict[str, Any]:
    from tests.models.checkpoints import SpecialTokens, make_prompt

    raw = json.loads((DEMO_CHECKPOINT / "config.json").read_text())
    special = SpecialTokens(*(raw[f"{name}_token_id"] for name in ("image", "vision_start", "vision_end")))
    return {name: make_prompt(layout, seed, special) for seed, (name, layout) in enumerate(PROMPTS.items())}


def _runner(backend: str, dtype: str, device: torch.device) -> StageRunner | None:
    """None when the backend does not serve this here."""
    page_size = FLASH_PAGE if backend == "flash" else 16
    try:
        return StageRunner.build(
            DEMO_CHECKPOINT, num_blocks=64, page_size=page_size, dtype=dtype, device=device, attention=backend,
            with_vision=True,
        )  # fmt: skip
    except StartupError:
        return None


def tokens(tiny: bool) -> dict[str, Any]:
    """float32: greedy tokens are the same. bf16: on the same tokens, our logits are about as far from transformers'
    float32 logits as its own bf16 logits are (root mean square over all of them)."""
    from tests.worker.harness import Harness

    device, prompts = device_of(tiny), _prompts()
    reference = Reference(torch.float32, device)
    expected = {name: reference.greedy(prompt) for name, prompt in prompts.items()}
    figures: dict[str, Any] = {"float32": {}, "bfloat16": {}}
    for backend in BACKENDS:
        if runner := _runner(backend, "float32", device):
            for name, prompt in prompts.items():
                (request,) = Harness([runner], runner.cache.num_blocks).run([prompt], NUM_OUTPUTS, chunk=32)
                runner.forget([request.request_id])
                if request.output != expected[name]:
                    raise Failed(f"{backend}, {name}: {request.output}, transformers has {expected[name]}", figures)
            figures["float32"][backend] = f"{len(prompts)} prompts equal"
    exact = {name: reference.logits(prompt, expected[name]) for name, prompt in prompts.items()}
    rounded = Reference(torch.bfloat16, device)
    theirs = _distance({name: rounded.logits(prompt, expected[name]) for name, prompt in prompts.items()}, exact)
    figures["bfloat16"]["transformers"] = theirs
    for backend in BACKENDS:
        if runner := _runner(backend, "bfloat16", device):
            ours = _distance({n: our_logits(runner, prompt, expected[n]) for n, prompt in prompts.items()}, exact)
            figures["bfloat16"][backend] = ours
            if not ours <= SPREAD * theirs:
                raise Failed(f"bf16 logits of {backend} are {ours:.2g} off, transformers' own {theirs:.2g}", figures)
    return figures


def _distance(logits: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Root mean square over all prompts and logits."""
    squares = torch.cat([(logits[name] - exact[name]).square().flatten() for name in exact])
    return round(float(squares.mean().sqrt()), 6)
