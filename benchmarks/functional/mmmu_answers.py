"""From what a model said to right or wrong, in the manner of MMMU's published rules. One exception: where those pick an
option at random because the model named none, the answer counts as wrong here."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.functional.mmmu_data import LETTERS, Question

NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?|-?\.\d+")
# Words that announce the answer; what follows the last of them counts.
ANNOUNCED = re.compile(r"(?:answer|option|choice)\s*(?:is|:)?\s*[:\s]*\(?([A-Z])\)?(?![A-Za-z])", re.IGNORECASE)
DIGITS = 2  # numbers are compared after rounding


def is_right(question: Question, said: str) -> bool:
    if question.options:
        return chosen_letter(said, question.options) in {answer.strip().upper() for answer in question.answers}
    return any(matches(answer, said) for answer in question.answers)


def chosen_letter(said: str, options: Sequence[str]) -> str | None:
    """The option that the model named: by its letter, announced, in brackets or standing alone, the last one counting;
    else by its text, if only one option's text occurs. None when it named none."""
    letters = LETTERS[: len(options)]
    text = said.strip()
    if bare := re.fullmatch(rf"\(?([{letters}])\)?[.:]?", text, re.IGNORECASE):
        return bare[1].upper()
    # "A" is also an article: alone it is an option only in brackets, before a stop or at the end of a line.
    for pattern in (
        ANNOUNCED,
        re.compile(rf"\(([{letters}])\)"),
        re.compile(rf"(?:^|\s)([{letters}])[.:)](?:\s|$)"),
        re.compile(rf"(?:^|\s)([{letters}])\s*$", re.MULTILINE),
        re.compile(rf"(?:^|\s)([{letters.replace('A', '')}])(?=\s|[,.;:]|$)"),
    ):
        named = [letter.upper() for letter in pattern.findall(text) if letter.upper() in letters]
        if named:
            return named[-1]
    spoken = [
        letter
        for letter, option in zip(letters, options, strict=True)
        if option.strip() and option.strip().lower() in text.lower()
    ]
    return spoken[0] if len(spoken) == 1 else None


def matches(answer: str, said: str) -> bool:
    """An open answer: a number is right when one that the model ended on is equal after rounding; words are right when
    they occur in what it said."""
    text = _conclusion(said)
    if (wanted := as_number(answer)) is not None:
        return wanted in {as_number(found) for found in NUMBER.findall(text)}
    return bool(re.search(rf"(?<!\w){re.escape(_plain(answer))}(?!\w)", _plain(text)))


def as_number(text: str) -> float | None:
    """The number that the text is, rounded; None when it is none."""
    try:
        return round(float(text.strip().replace(",", "").rstrip("%").lstrip("$")), DIGITS)
    except ValueError:
        return None


def _conclusion(said: str) -> str:
    """What follows the last word of conclusion, or the last equals sign of a calculation; all when there is none."""
    parts = re.split(
        r"\b(?:so|thus|therefore|final answer|answer|result)\b(?:\s+is)?\s*:?|=", said, flags=re.IGNORECASE
    )
    kept = [part for part in parts if part.strip(" .\n")]
    return kept[-1] if kept else said


def _plain(text: str) -> str:
    return " ".join(text.lower().strip(" .\n").split())
