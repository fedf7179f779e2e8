"""Questions about one of several pictures, with their answers, as OpenAI chat messages.

`held_out(n, seed)` is what tests and load generators use: it needs only numpy and Pillow, and its pictures come from
another random stream than training's, one in ten of them with a combination that training never drew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.demo_model.pictures import (
    COLOURS,
    CONTENTS,
    DIGITS,
    MAX_SIDE,
    MIN_SIDE,
    SHAPES,
    Content,
    draw,
    draw_sides,
)

MAX_PICTURES = 8
MAX_TURNS = 3
Filled = tuple[dict[str, str], str]  # a wording's slots, and the answer
HELD_OUT_STREAM, TRAINING_STREAM = 1, 2  # first words of the seeds: the two never draw the same numbers
HELD_OUT_SHARE = 0.1  # of a held-out question's pictures: combinations that training never drew
GREETINGS = ("hello", "hello!", "hi", "hi there", "who are you?", "what are you?", "what can you do?", "help")
GREETING_ANSWER = "I answer questions about pictures of shapes"

# Kind of question -> its wordings. {i} is a picture's number, {shape}, {colour} and {digit} what it shows.
WORDINGS: dict[str, tuple[str, ...]] = {
    "colour of picture": (
        "what colour is picture {i}?",
        "which colour is picture {i}?",
        "what is the colour of picture {i}?",
        "what colour is the shape in picture {i}?",
    ),
    "shape of picture": (
        "what shape is in picture {i}?",
        "which shape is in picture {i}?",
        "what shape does picture {i} show?",
        "what is the shape in picture {i}?",
    ),
    "digit of picture": (
        "what digit is in picture {i}?",
        "which digit is in picture {i}?",
        "what digit does picture {i} show?",
        "what number is on picture {i}?",
        "what is the digit in picture {i}?",
    ),
    "picture of shape": (
        "which picture shows {a_shape}?",
        "which picture has {a_shape}?",
        "where is the {shape}?",
        "in which picture is the {shape}?",
    ),
    "picture of colour": (
        "which picture is {colour}?",
        "which picture shows {a_colour} shape?",
        "where is the {colour} shape?",
        "in which picture is the {colour} shape?",
    ),
    "picture of digit": (
        "which picture shows the digit {digit}?",
        "which picture has the digit {digit}?",
        "where is the digit {digit}?",
        "in which picture is the digit {digit}?",
    ),
    "colour of shape": ("what colour is the {shape}?", "which colour is the {shape}?", "what colour has the {shape}?"),
    "shape of colour": ("what shape is {colour}?", "which shape is {colour}?", "what is the {colour} shape?"),
    "digit of shape": (
        "what digit is on the {shape}?",
        "which digit is on the {shape}?",
        "what number is on the {shape}?",
    ),
    "digit of colour": (
        "what digit is on the {colour} picture?",
        "which digit is on the {colour} picture?",
        "which digit is on the {colour} shape?",
    ),
    "colour of digit": ("what colour is the shape with the digit {digit}?", "what colour has the digit {digit}?"),
    "shape of digit": ("what shape has the digit {digit}?", "which shape shows the digit {digit}?"),
    "is there shape": ("is there {a_shape}?", "do you see {a_shape}?", "is {a_shape} in any picture?"),
    "is there colour": ("is there {a_colour} shape?", "is any picture {colour}?", "do you see {a_colour} shape?"),
    "is there digit": ("is there the digit {digit}?", "do you see the digit {digit}?"),
    "count": ("how many pictures are there?", "how many pictures do you see?", "how many pictures?"),
    "describe": (
        "describe picture {i}",
        "what is in picture {i}?",
        "what does picture {i} show?",
        "tell me about picture {i}",
    ),
}
# More wordings where there is one picture and no number is needed.
SINGLE_WORDINGS: dict[str, tuple[str, ...]] = {
    "colour of picture": ("what colour is it?", "what colour is this?", "what colour is the picture?"),
    "shape of picture": ("what shape is it?", "what shape is this?", "what shape do you see?"),
    "digit of picture": ("what digit is it?", "what digit is this?", "what digit do you see?"),
    "describe": ("describe the picture", "what is this?", "what do you see?", "what is in the picture?"),
}
KINDS: tuple[str, ...] = tuple(WORDINGS)


@dataclass(frozen=True)
class Ask:
    """One question's words, its answer, its kind, and what it names: a picture's number "i", a shape, ..."""

    kind: str
    text: str
    answer: str
    slots: Mapping[str, str]


@dataclass(frozen=True)
class Turn:
    """One user turn: the pictures it brings, whether its text stands before them, and the question."""

    contents: tuple[Content, ...]
    text_first: bool
    ask: Ask


@dataclass(frozen=True)
class Question:
    """A conversation that ends in a question. `messages` hold `PIL.Image` objects in parts of type "image"."""

    kind: str
    pictures: list[Image.Image]
    messages: list[dict[str, Any]]
    answer: str
    num_turns: int


def with_article(word: str) -> str:
    """The word after "a" or "an"."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _only(contents: Sequence[Content], attribute: str, value: str) -> Content | None:
    """The one content whose attribute has this value, or None when there is none or more than one."""
    found = [content for content in contents if getattr(content, attribute) == value]
    return found[0] if len(found) == 1 else None


def _pick(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


def _about_number(rng: np.random.Generator, contents: Sequence[Content], kind: str) -> Filled | None:
    """Slots and answer for a question that names a picture by its number."""
    if not contents:
        return None
    number = int(rng.integers(len(contents)))
    content = contents[number]
    described = f"{with_article(content.colour)} {content.shape} with the digit {content.digit}"
    answers = {
        "colour of picture": content.colour,
        "shape of picture": content.shape,
        "digit of picture": content.digit,
        "describe": described,
    }
    return {"i": str(number + 1)}, answers[kind]


def _about_value(rng: np.random.Generator, contents: Sequence[Content], kind: str) -> Filled | None:
    """Slots and answer for a question that names the only picture with some shape, colour or digit."""
    wanted, given = kind.split(" of ")
    only = [content for content in contents if _only(contents, given, getattr(content, given)) is not None]
    if not only:
        return None
    content = _pick(rng, only)
    answer = f"picture {contents.index(content) + 1}" if wanted == "picture" else getattr(content, wanted)
    return {given: getattr(content, given)}, answer


def _about_presence(rng: np.random.Generator, contents: Sequence[Content], kind: str) -> Filled:
    """Slots and answer for "is there ...?": yes and no about equally often."""
    attribute = kind.removeprefix("is there ")
    values = {"shape": tuple(SHAPES), "colour": tuple(COLOURS), "digit": DIGITS}[attribute]
    present = sorted({getattr(content, attribute) for content in contents})
    absent = [value for value in values if value not in present]
    yes = bool(present) and (not absent or rng.random() < 0.5)
    return {attribute: _pick(rng, present if yes else absent)}, "yes" if yes else "no"


def _about_count(rng: np.random.Generator, contents: Sequence[Content], kind: str) -> Filled:
    return {}, str(len(contents))


def _asker(kind: str) -> Callable[[np.random.Generator, Sequence[Content], str], Filled | None]:
    if kind == "count":
        return _about_count
    if kind.startswith("is there"):
        return _about_presence
    return _about_number if kind.endswith("of picture") or kind == "describe" else _about_value


def _spoken(rng: np.random.Generator, text: str) -> str:
    """Varies capitals, spelling, the word for a picture, and the question mark."""
    if rng.random() < 0.2:
        text = text.replace("colour", "color")
    if rng.random() < 0.2:
        text = text.replace("picture", "image")
    if rng.random() < 0.15:
        text = text.removesuffix("?")
    return text[0].upper() + text[1:] if rng.random() < 0.4 else text


def ask(rng: np.random.Generator, contents: Sequence[Content], kind: str) -> Ask | None:
    """A question of this kind about `contents` in order, or None where none can be asked without doubt."""
    slots_and_answer = _asker(kind)(rng, contents, kind)
    if slots_and_answer is None:
        return None
    slots, answer = slots_and_answer
    wordings = WORDINGS[kind]
    if len(contents) == 1 and kind in SINGLE_WORDINGS and rng.random() < 0.5:
        wordings = SINGLE_WORDINGS[kind]
    articles = {f"a_{slot}": with_article(value) for slot, value in slots.items()}
    return Ask(kind, _spoken(rng, _pick(rng, wordings).format(**slots, **articles)), answer, slots)


def ask_any(rng: np.random.Generator, contents: Sequence[Content]) -> Ask:
    """A question of any kind that fits, all kinds alike."""
    while True:
        asked = ask(rng, contents, _pick(rng, KINDS))
        if asked is not None:
            return asked


def draw_contents(rng: np.random.Generator, num_pictures: int, held_out_share: float) -> tuple[Content, ...]:
    """Contents of a conversation's pictures; that share of them from the combinations that training never draws."""
    seen = [content for content in CONTENTS if not content.is_held_out]
    kept = [content for content in CONTENTS if content.is_held_out]
    return tuple(_pick(rng, kept if rng.random() < held_out_share else seen) for _ in range(num_pictures))


def draw_turns(rng: np.random.Generator, contents: Sequence[Content], num_turns: int) -> list[Turn]:
    """A conversation about `contents`: most pictures come in the first turn, sometimes the last few in a later one."""
    late = int(rng.integers(1, len(contents))) if num_turns > 1 and len(contents) > 1 and rng.random() < 0.3 else 0
    late_turn = int(rng.integers(1, num_turns)) if late else 0
    turns: list[Turn] = []
    for number in range(num_turns):
        num_shown = len(contents) - (late if number < late_turn else 0)
        first_new = sum(len(turn.contents) for turn in turns)
        new = tuple(contents[first_new:num_shown])
        turns.append(Turn(new, bool(new) and rng.random() < 0.3, ask_any(rng, contents[:num_shown])))
    return turns


def user_content(turn: Turn, pictures: Sequence[Image.Image]) -> str | list[dict[str, Any]]:
    """A user message's content: parts, or a plain string where the turn brings no pictures."""
    if not pictures:
        return turn.ask.text
    text = [{"type": "text", "text": turn.ask.text}]
    images = [{"type": "image", "image": picture} for picture in pictures]
    return text + images if turn.text_first else images + text


def _question(rng: np.random.Generator, turns: Sequence[Turn], sides: tuple[int, int]) -> Question:
    pictures: list[Image.Image] = []
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        if number:
            messages.append({"role": "assistant", "content": turns[number - 1].ask.answer})
        new = [draw(rng, content, *draw_sides(rng, *sides)) for content in turn.contents]
        pictures += new
        messages.append({"role": "user", "content": user_content(turn, new)})
    return Question(turns[-1].ask.kind, pictures, messages, turns[-1].ask.answer, len(turns))


def questions(
    seed: int,
    *,
    min_pictures: int = 1,
    max_pictures: int = 6,
    max_turns: int = MAX_TURNS,
    sides: tuple[int, int] = (MIN_SIDE, MAX_SIDE),
) -> Iterator[Question]:
    """Held-out questions without end. Question k depends on the arguments and k only."""
    for number in range(1 << 62):
        rng = np.random.default_rng([HELD_OUT_STREAM, seed, number])
        contents = draw_contents(rng, int(rng.integers(min_pictures, max_pictures + 1)), HELD_OUT_SHARE)
        num_turns = 1 if rng.random() < 0.6 else int(rng.integers(1, max_turns + 1))
        yield _question(rng, draw_turns(rng, contents, num_turns), sides)


def held_out(
    n: int,
    seed: int = 0,
    *,
    min_pictures: int = 1,
    max_pictures: int = 6,
    max_turns: int = MAX_TURNS,
    sides: tuple[int, int] = (MIN_SIDE, MAX_SIDE),
) -> list[Question]:
    """The first `n` held-out questions of a seed.

    min_pictures, max_pictures: pictures a conversation, up to MAX_PICTURES as trained.
    max_turns: user turns a conversation; the earlier turns come with their right answers.
    sides: least and greatest picture side, pixels.
    """
    stream = questions(seed, min_pictures=min_pictures, max_pictures=max_pictures, max_turns=max_turns, sides=sides)
    return [next(stream) for _ in range(n)]


def is_right(question: Question, text: str) -> bool:
    """Exact match after stripping white space and folding case."""
    return text.strip().casefold() == question.answer.casefold()
