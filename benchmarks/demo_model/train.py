"""Makes the demo checkpoint from nothing.

    python -m benchmarks.demo_model.train --out gllm/assets/demo [--seed 0] [--threads 1]

Step 1 trains the ViT on drawn pictures (vision_training.py), step 2 the text model on its features
(text_training.py). Then held-out questions are put to transformers (evaluate.py), and the numbers are saved beside
the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from benchmarks.demo_model.architecture import generation_config, model_config, save_image_processor
from benchmarks.demo_model.evaluate import Reference, accuracy
from benchmarks.demo_model.questions import held_out
from benchmarks.demo_model.text_training import TextPlan, encode_pool, fill_text, train_text
from benchmarks.demo_model.tokenizer import build_tokenizer
from benchmarks.demo_model.vision_training import VisionPlan, WordTargets, train_vision

EVALUATION_QUESTIONS = 500


def save(model: Qwen2_5_VLForConditionalGeneration, tokenizer: Qwen2Tokenizer, out: Path) -> None:
    """Writes every file that a Qwen2.5-VL checkpoint folder has."""
    model.generation_config = generation_config(tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    save_image_processor(out)
    (out / "model.safetensors").chmod(0o644)


def train(out: Path, seed: int) -> float:
    """Trains and saves a checkpoint. Returns the seconds that training took."""
    started = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - started:6.0f} s] {line}", flush=True)

    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = Qwen2_5_VLForConditionalGeneration(model_config(tokenizer))
    fill_text(model, tokenizer)
    targets = WordTargets(tokenizer, model.get_input_embeddings().weight)
    train_vision(model.model.visual, targets, VisionPlan(), (seed, 1), say)
    save(model, tokenizer, out)  # what a run that is broken off leaves
    train_text(model, tokenizer, encode_pool(model, TextPlan().pool, (seed, 2)), TextPlan(), (seed, 3), say)
    seconds = time.perf_counter() - started
    save(model, tokenizer, out)
    return seconds


def save_record(out: Path, seed: int, seconds: float, threads: int) -> dict[str, object]:
    """Puts held-out questions to the saved checkpoint and writes training.json: how it was made, what it can do."""
    result = accuracy(Reference(out), held_out(EVALUATION_QUESTIONS, seed=0))
    record: dict[str, object] = {
        "command": f"python -m benchmarks.demo_model.train --out DIR --seed {seed} --threads {threads}",
        "training seconds": round(seconds),
        "torch": torch.__version__,
        "held-out questions": EVALUATION_QUESTIONS,
        **result,
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def main() -> None:
    """Trains, saves, evaluates, and prints the record as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    seconds = train(options.out, options.seed)
    print(json.dumps(save_record(options.out, options.seed, seconds, options.threads), indent=2))


if __name__ == "__main__":
    main()
