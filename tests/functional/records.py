"""A few made-up questions in the layouts of MMMU."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from PIL import Image


def png(colour: str, side: int = 56) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(buffer, "PNG")
    return buffer.getvalue()


def record(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"validation_Art_{number}",
        "question": "Which colour has <image 1>?",
        "options": "['red', 'blue', 'green']",
        "answer": "B",
        "question_type": "multiple-choice",
        "image_1": "blue.png",
        **fields,
    }


RECORDS = [
    record(1),
    record(2, question="<image 1> and <image 2>: which is red?", options=["<image 1>", "<image 2>"], image_2="red.png"),
    record(3, question="How many corners has <image 1>?", options="[]", answer="4", question_type="open"),
]


def write_jsonl(folder: Path) -> Path:
    """Two subjects: one with its images in `images/`, one beside the file."""
    for name, where in (("Art", "images"), ("Music", "")):
        home = folder / name
        (home / where).mkdir(parents=True, exist_ok=True)
        for colour in ("blue", "red"):
            (home / where / f"{colour}.png").write_bytes(png(colour))
        lines = [json.dumps(r) for r in RECORDS]
        (home / "validation.jsonl").write_text("\n".join(lines) + "\n")
    return folder
