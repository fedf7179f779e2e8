"""Small random checkpoints for tests, written by transformers, and transformers as the reference on them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gllm.core.request import Item
from tests.worker.harness import Prompt

IMAGE, VISION_START, VISION_END, VOCAB = 290, 291, 292, 301


def write_tiny(target: Path, *, tied: bool, seed: int = 0) -> Path:
    """Odd sizes on purpose: 6 heads over 2 KV heads, windows of 3x3 tokens, layers that divide by no stage count."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB, "hidden_size": 72, "intermediate_size": 90, "num_hidden_layers": 4,
            "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 4096,
            "tie_word_embeddings": tied, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 3]},
        },
        vision_config={
            "depth": 4, "hidden_size": 48, "intermediate_size": 70, "num_heads": 4, "out_hidden_size": 72,
            "fullatt_block_indexes": [1, 3], "window_size": 84, "spatial_patch_size": 14,
        },
        image_token_id=IMAGE, vision_start_token_id=VISION_START, vision_end_token_id=VISION_END,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and not name.endswith("norm.weight"):
                parameter.normal_(std=0.1)  # biases that matter
            elif parameter.dim() > 1:
                parameter.mul_(4.0)  # logits far enough apart that greedy tokens are no accident
    model.save_pretrained(target)
    return target


def reference_model(checkpoint: Path) -> Any:
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    image: int = IMAGE
    start: int = VISION_START
    end: int = VISION_END


def make_prompt(
    layout: Sequence[int | tuple[int, int]], seed: int = 0, special: SpecialTokens = SpecialTokens(), vocab: int = 280
) -> Prompt:
    """layout: an int is that many random text tokens, (h, w) an image of h x w patches between its two markers."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    items: list[Item] = []
    images: list[torch.Tensor] = []
    for part in layout:
        if isinstance(part, int):
            drawn = torch.randint(3, vocab, (part,), generator=generator).tolist()
            tokens += [3 if token in (special.image, special.start, special.end) else token for token in drawn]
            continue
        height, width = part
        tokens.append(special.start)
        items.append(Item(len(tokens), height * width // 4, (1, height, width)))
        tokens += [special.image] * items[-1].num_tokens
        tokens.append(special.end)
        size = (height * 14, width * 14, 3)
        images.append(torch.randint(0, 256, size, dtype=torch.uint8, generator=generator))
    return Prompt(tokens, tuple(items), tuple(images))


def pixel_values(prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
    """By the reference image processor: pixel values [patches, 1176] and grids [images, 3]."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    out = Qwen2VLImageProcessorPil(do_resize=False)([i.numpy() for i in prompt.images], return_tensors="pt")
    return out["pixel_values"], out["image_grid_thw"]


@dataclass(frozen=True, slots=True)
class Expected:
    """Greedy tokens, and the logits [vocabulary] that each was chosen from."""

    tokens: list[int]
    logits: list[torch.Tensor]


@torch.no_grad()
def greedy(reference: Any, prompt: Prompt, num_outputs: int, image_token: int = IMAGE) -> Expected:
    """What transformers generates."""
    ids = torch.tensor([prompt.token_ids])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if prompt.images:
        inputs["pixel_values"], inputs["image_grid_thw"] = pixel_values(prompt)
        inputs["mm_token_type_ids"] = (ids == image_token).int()  # else positions silently fall back to 1-D
    out = reference.generate(
        **inputs, do_sample=False, max_new_tokens=num_outputs, min_new_tokens=num_outputs, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return Expected(out.sequences[0, len(prompt.token_ids) :].tolist(), [step[0].float() for step in out.logits])
