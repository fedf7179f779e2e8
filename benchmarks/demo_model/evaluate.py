"""Asks transformers the held-out questions, greedily, one at a time: the accuracy of a checkpoint, kind by kind.

python -m benchmarks.demo_model.evaluate [--model gllm/assets/demo] [-n 500] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.demo_model.pictures import MAX_SIDE, MIN_SIDE
from benchmarks.demo_model.questions import MAX_TURNS, Question, held_out, is_right

BUNDLED = Path(__file__).resolve().parents[2] / "gllm" / "assets" / "demo"


class Reference:
    """A checkpoint in transformers, as the reference for answers."""

    def __init__(self, folder: Path) -> None:
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def inputs(self, question: Question) -> dict[str, torch.Tensor]:
        """The model's arguments for one conversation.

        input_ids, mm_token_type_ids [1, T]; pixel_values [patches, 1176]; image_grid_thw [pictures, 3].
        """
        prompt = self.tokenizer.apply_chat_template(question.messages, tokenize=False, add_generation_prompt=True)
        images: dict[str, torch.Tensor] = {}
        if question.pictures:
            encoded = self.processor(question.pictures, return_tensors="pt")
            images = {name: encoded[name] for name in ("pixel_values", "image_grid_thw")}
            pieces = prompt.split("<|image_pad|>")
            sizes = (images["image_grid_thw"].prod(-1) // self.processor.merge_size**2).tolist()
            assert len(pieces) == len(sizes) + 1
            prompt = pieces[0] + "".join(
                "<|image_pad|>" * size + piece for size, piece in zip(sizes, pieces[1:], strict=True)
            )
        ids = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        kinds = (ids == self.model.config.image_token_id).int()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **images}

    @torch.inference_mode()
    def answer(self, question: Question, max_new_tokens: int = 16) -> str:
        """The greedy answer, without special tokens."""
        inputs = self.inputs(question)
        self.model.model.rope_deltas = None  # of the conversation before
        output = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        new = output[0, inputs["input_ids"].shape[1] :]
        return str(self.tokenizer.decode(new, skip_special_tokens=True))


def accuracy(reference: Reference, asked: Iterable[Question]) -> dict[str, Any]:
    """Shares of right answers: overall, by kind, by number of pictures, by number of turns; and the wrong answers."""
    right: dict[str, dict[str, list[bool]]] = {name: defaultdict(list) for name in ("all", "kind", "pictures", "turns")}
    wrong: list[str] = []
    for question in asked:
        answer = reference.answer(question)
        is_good = is_right(question, answer)
        if not is_good:
            wrong.append(f"{question.kind}, {len(question.pictures)} pictures: {answer!r}, not {question.answer!r}")
        keys = {"all": "all", "kind": question.kind}
        keys |= {"pictures": str(len(question.pictures)), "turns": str(question.num_turns)}
        for name, key in keys.items():
            right[name][key].append(is_good)
    shares = {
        name: {key: round(sum(answers) / len(answers), 4) for key, answers in sorted(group.items())}
        for name, group in right.items()
    }
    counts = {kind: len(answers) for kind, answers in sorted(right["kind"].items())}
    return {"accuracy": shares.pop("all")["all"], **shares, "questions by kind": counts, "wrong": wrong}


def main() -> None:
    """Prints the accuracy as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=BUNDLED, help="checkpoint folder")
    parser.add_argument("-n", type=int, default=500, help="number of questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-pictures", type=int, default=1)
    parser.add_argument("--max-pictures", type=int, default=6)
    parser.add_argument("--max-turns", type=int, default=MAX_TURNS)
    parser.add_argument("--sides", type=int, nargs=2, default=(MIN_SIDE, MAX_SIDE), help="picture sides, pixels")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    asked = held_out(
        options.n,
        options.seed,
        min_pictures=options.min_pictures,
        max_pictures=options.max_pictures,
        max_turns=options.max_turns,
        sides=tuple(options.sides),
    )
    result = accuracy(Reference(options.model), asked)
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({"questions": options.n, "seed": options.seed, "seconds": seconds, **result}, indent=2))


if __name__ == "__main__":
    main()
