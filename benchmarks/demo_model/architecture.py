"""The demo's sizes, and the files of a checkpoint folder that hold no weights."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2Tokenizer

MIN_PIXELS = 56 * 56
MAX_PIXELS = 224 * 224
PATCH, MERGE, TEMPORAL_PATCH = 14, 2, 2
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HIDDEN = 128
VOCAB_MULTIPLE = 64


def model_config(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLConfig:
    """A Qwen2.5-VL of about 2 million parameters.

    Everything that is shared out over two ranks is even, and four pipeline stages get a layer each. Windows are 112
    pixels on a side, as in the published models: most of the pictures are larger and have several, whole and partial.
    """
    names = ("endoftext", "im_end", "image_pad", "video_pad", "vision_start", "vision_end")
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names}
    text = {
        "vocab_size": -(-len(tokenizer) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "hidden_size": HIDDEN,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "max_window_layers": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": ids["endoftext"],
        "eos_token_id": ids["im_end"],
        "tie_word_embeddings": True,
    }
    vision = {
        "depth": 4,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_heads": 4,
        "out_hidden_size": HIDDEN,
        "window_size": 112,
        "fullatt_block_indexes": [1, 3],
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=True,
        dtype="float32",
        bos_token_id=ids["endoftext"],
        eos_token_id=ids["im_end"],
    )


def generation_config(tokenizer: Qwen2Tokenizer) -> GenerationConfig:
    """Greedy; an answer ends at <|im_end|> or <|endoftext|>."""
    end_of_text, end_of_turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    return GenerationConfig(
        do_sample=False, bos_token_id=end_of_text, pad_token_id=end_of_text, eos_token_id=[end_of_turn, end_of_text]
    )


def save_image_processor(folder: Path) -> None:
    """Writes preprocessor_config.json as Qwen2.5-VL's own checkpoints have it."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": MIN_PIXELS,
        "max_pixels": MAX_PIXELS,
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL_PATCH,
        "merge_size": MERGE,
        "image_mean": list(CLIP_MEAN),
        "image_std": list(CLIP_STD),
    }
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")
