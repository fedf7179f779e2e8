"""MMMU's validation questions from a local copy. Nothing is downloaded.

Two layouts, as the dataset is published and as it is often kept:
* parquet: files named like `validation-00000-of-00001.parquet` in a folder for each subject (needs pyarrow);
* JSONL: one question a line with the same fields, in `SUBJECT.jsonl` or `SUBJECT/validation.jsonl`; an image is a path
  relative to the file, or to `images/` beside it.
Fields: id, question, options (a list, or one written as text), answer, question_type, image_1 to image_7.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

MAX_IMAGES = 7
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PLACEHOLDER = re.compile(r"<image (\d+)>")
MULTIPLE_CHOICE = "multiple-choice"


@dataclass(frozen=True, slots=True)
class Question:
    """options: none for an open question. answers: every string that counts as right (of a choice: its letter).
    images: by the number in their placeholder."""

    question_id: str
    subject: str
    text: str
    options: tuple[str, ...]
    answers: tuple[str, ...]
    images: dict[int, Image.Image]


def load(folder: Path) -> list[Question]:
    """All questions below a folder, by subject. Raises ValueError when there are none or one is malformed."""
    jsonl, parquet = sorted(folder.rglob("*.jsonl")), sorted(folder.rglob("validation-*.parquet"))
    if parquet and not jsonl and importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"{folder} has parquet files, which need pyarrow: install it, or keep the questions as JSONL")
    found = [question for path in jsonl for question in _read_jsonl(path)]
    if not jsonl:
        found = [question for path in parquet for question in _read_parquet(path)]
    if not found:
        raise ValueError(f"no questions in {folder}: neither *.jsonl nor validation-*.parquet below it")
    return found


def _read_jsonl(path: Path) -> Iterator[Question]:
    subject = path.parent.name if path.stem.startswith("validation") else path.stem
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            try:
                yield question_of(json.loads(line), subject, path.parent)
            except (KeyError, ValueError, OSError) as error:
                raise ValueError(f"{path.name}, line {number}: {type(error).__name__}: {error}") from None


def _read_parquet(path: Path) -> Iterator[Question]:
    parquet = importlib.import_module("pyarrow.parquet")
    for record in parquet.read_table(path).to_pylist():
        try:
            yield question_of(record, path.parent.name, path.parent)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(f"{path.name}, {record.get('id')}: {type(error).__name__}: {error}") from None


def question_of(record: dict[str, Any], subject: str, folder: Path) -> Question:
    """Raises KeyError, ValueError or OSError when the record is malformed or its image is not there."""
    options = tuple(map(str, _as_list(record.get("options") or [])))
    if record.get("question_type", MULTIPLE_CHOICE) == MULTIPLE_CHOICE and not 2 <= len(options) <= len(LETTERS):
        raise ValueError(f"a multiple-choice question with {len(options)} options")
    images = {}
    for number in range(1, MAX_IMAGES + 1):
        value = record.get(f"image_{number}")
        if value is not None:
            images[number] = _image(value, folder)
    text = str(record["question"])
    missing = {int(n) for n in PLACEHOLDER.findall(" ".join([text, *options]))} - set(images)
    if missing:
        raise ValueError(f"the question names image {min(missing)}, which is not there")
    answers = tuple(map(str, _as_list(record["answer"])))
    return Question(str(record["id"]), subject, text, options, answers, images)


def _as_list(value: Any) -> list[Any]:
    """A list, a list written as text, or one value."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return [value]
        return list(parsed) if isinstance(parsed, list | tuple) else [value]
    return [value]


def _image(value: Any, folder: Path) -> Image.Image:
    """From a path, or from {"bytes", "path"} as the published files have it."""
    if isinstance(value, dict) and value.get("bytes"):
        picture = Image.open(io.BytesIO(value["bytes"]))
    else:
        name = value["path"] if isinstance(value, dict) else value
        path = folder / name
        picture = Image.open(path if path.exists() else folder / "images" / name)
    return picture.convert("RGB")
