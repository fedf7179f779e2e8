"""Training conversations as token trees: one trunk with the pictures, and several branches that ask about it.

Every branch sees the trunk and itself only, at the positions it would have alone, so that one pass over a tree equals
one pass over each of its conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Tokenizer

from benchmarks.demo_model.pictures import Content
from benchmarks.demo_model.questions import GREETING_ANSWER, GREETINGS, MAX_PICTURES, MAX_TURNS, Ask, ask_any
from benchmarks.demo_model.tokenizer import DEFAULT_SYSTEM

IGNORED = -100
TRUNK = 0
SYSTEMS = ("Answer in one word.", "Be brief.", "You see pictures.", "", "Look closely at every picture and answer.")
Encode = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True)
class EncodedPicture:
    """What a picture shows, its size in merged tokens (rows, columns), its features [rows * columns, hidden]."""

    content: Content
    grid: tuple[int, int]
    features: Tensor


@dataclass
class Tree:
    """One conversation tree. All lists but `pictures` have an entry per token."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)  # the token itself where it is to be learnt, else IGNORED
    weights: list[float] = field(default_factory=list)
    positions: list[tuple[int, int, int]] = field(default_factory=list)  # frame, row, column
    branches: list[int] = field(default_factory=list)
    pictures: list[EncodedPicture] = field(default_factory=list)
    picture_starts: list[int] = field(default_factory=list)
    asked: list[tuple[int, Ask]] = field(
        default_factory=list
    )  # with the index of each token that foretells a word of the answer


class TreeWriter:
    """Writes one tree, token by token, in the chat template's words."""

    def __init__(self, encode: Encode, image_id: int) -> None:
        self.tree = Tree()
        self._encode = encode
        self._image_id = image_id
        self._branch = TRUNK
        self._num_branches = 0
        self._cursor = 0
        self._trunk_end = 0

    def branch(self) -> None:
        """Begins a new branch at the trunk's end."""
        if self._branch == TRUNK:
            self._trunk_end = self._cursor
        self._num_branches += 1
        self._branch, self._cursor = self._num_branches, self._trunk_end

    def text(self, text: str, weight: float = 0.0) -> None:
        """Appends text with special tokens by name; with a weight above 0 it is to be learnt."""
        for token in self._encode(text):
            position = (self._cursor, self._cursor, self._cursor)
            self._append(token, token if weight > 0.0 else IGNORED, weight, position)
            self._cursor += 1

    def picture(self, picture: EncodedPicture) -> None:
        """Appends a picture with its label."""
        tree = self.tree
        self.text(f"Picture {len(tree.pictures) + 1}: <|vision_start|>")
        tree.pictures.append(picture)
        tree.picture_starts.append(len(tree.ids))
        rows, columns = picture.grid
        for row in range(rows):
            for column in range(columns):
                position = (self._cursor, self._cursor + row, self._cursor + column)
                self._append(self._image_id, IGNORED, 0.0, position)
        self._cursor += max(rows, columns)
        self.text("<|vision_end|>")

    def answer(self, asked: Ask, weight: float = 1.0) -> None:
        """Ends the user's turn and appends the assistant's, up to its end token."""
        self.text("<|im_end|>\n<|im_start|>assistant\n")
        if asked.kind.startswith("picture of"):
            weight *= 2.0  # one token of the answer's four is not the same in all of them
        begin = len(self.tree.ids) - 1
        self.text(asked.answer + "<|im_end|>", weight)
        self.tree.asked += [(index, asked) for index in range(begin, len(self.tree.ids) - 2)]

    def next_user(self) -> None:
        """Opens the next user turn."""
        self.text("\n<|im_start|>user\n")

    def _append(self, token: int, label: int, weight: float, position: tuple[int, int, int]) -> None:
        tree = self.tree
        tree.ids.append(token)
        tree.labels.append(label)
        tree.weights.append(weight)
        tree.positions.append(position)
        tree.branches.append(self._branch)


def cached_encode(tokenizer: Qwen2Tokenizer) -> Encode:
    """Text with special tokens by name -> ids; the template's and the questions' pieces recur, so they are kept."""

    @lru_cache(maxsize=100_000)
    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    return encode


def _ask(rng: np.random.Generator, contents: Sequence[Content]) -> Ask:
    if not contents and rng.random() < 0.5:
        text = GREETINGS[int(rng.integers(len(GREETINGS)))]
        text = text[0].upper() + text[1:] if rng.random() < 0.5 else text
        return Ask("greeting", text, GREETING_ANSWER, {})
    return ask_any(rng, contents)


def _write_trunk(rng: np.random.Generator, writer: TreeWriter, pictures: Sequence[EncodedPicture]) -> tuple[int, bool]:
    """Writes the turns that bring pictures. Returns how many turns are complete, and whether one is left open."""
    num_late = int(rng.integers(1, len(pictures))) if len(pictures) > 1 and rng.random() < 0.25 else 0
    groups = [pictures[: len(pictures) - num_late]] + ([pictures[len(pictures) - num_late :]] if num_late else [])
    for number, group in enumerate(groups):
        if number:
            writer.next_user()
        shown = [picture.content for picture in writer.tree.pictures] + [picture.content for picture in group]
        asked = _ask(rng, shown)
        is_open = number == len(groups) - 1 and rng.random() < 0.6
        text_first = bool(group) and not is_open and rng.random() < 0.8
        if text_first:
            writer.text(asked.text)
            writer.text("\n")
        for picture in group:
            writer.picture(picture)
        if is_open:
            return number, True
        if not text_first:
            writer.text(asked.text)
        writer.answer(asked, 2.0 if text_first else 1.0)
    return len(groups), False


def grow_tree(
    rng: np.random.Generator, encode: Encode, image_id: int, pool: Sequence[EncodedPicture], num_branches: int
) -> Tree:
    """A tree about 0 to MAX_PICTURES pictures of the pool, with that many branches of one to three turns in all."""
    num_pictures = 0 if rng.random() < 0.03 else int(rng.integers(1, MAX_PICTURES + 1))
    pictures = [pool[int(number)] for number in rng.integers(len(pool), size=num_pictures)]
    contents = [picture.content for picture in pictures]
    writer = TreeWriter(encode, image_id)
    system = DEFAULT_SYSTEM if rng.random() < 0.85 else SYSTEMS[int(rng.integers(len(SYSTEMS)))]
    writer.text(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")
    num_done, is_open = _write_trunk(rng, writer, pictures)
    for _ in range(num_branches if is_open else num_branches // 2):
        writer.branch()
        num_more = 1 if rng.random() < 0.65 else int(rng.integers(1, max(1, MAX_TURNS - num_done) + 1))
        for number in range(num_more):
            if number or not is_open:
                writer.next_user()
            asked = _ask(rng, contents)
            writer.text(asked.text)
            writer.answer(asked)
    return writer.tree


@dataclass(frozen=True)
class TreeBatch:
    """Trees padded to one length T.

    ids, labels [B, T]; weights [B, T]; positions [3, B, T]; mask bool [B, 1, T, T], true where a token may look;
    features [pictures' tokens, hidden] for the image tokens in order; picture_ends: (tree, index of the picture's
    <|vision_end|>), its number and content in `numbers` and `contents`; asked: (tree, index of a token that foretells
    a word of the answer) of each of the `asks`.
    """

    ids: Tensor
    labels: Tensor
    weights: Tensor
    positions: Tensor
    mask: Tensor
    features: Tensor
    picture_ends: tuple[Tensor, Tensor]
    numbers: Tensor
    contents: tuple[Content, ...]
    asked: tuple[Tensor, Tensor]
    asks: tuple[Ask, ...]


def stack_trees(trees: Sequence[Tree], hidden: int) -> TreeBatch:
    """Pads trees to the longest. Padding sees itself only and is seen by nothing before it."""
    longest = max(len(tree.ids) for tree in trees)
    ids = torch.zeros(len(trees), longest, dtype=torch.long)
    labels, weights = torch.full_like(ids, IGNORED), torch.zeros(ids.shape)
    positions = torch.zeros(3, *ids.shape, dtype=torch.long)
    branches = torch.full_like(ids, -1)
    ends: list[tuple[int, int, int]] = []
    for row, tree in enumerate(trees):
        length = len(tree.ids)
        ids[row, :length] = torch.tensor(tree.ids)
        labels[row, :length] = torch.tensor(tree.labels)
        weights[row, :length] = torch.tensor(tree.weights)
        positions[:, row, :length] = torch.tensor(tree.positions).T
        branches[row, :length] = torch.tensor(tree.branches)
        for number, (start, picture) in enumerate(zip(tree.picture_starts, tree.pictures, strict=True)):
            ends.append((row, start + len(picture.features), number))
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    related = (branches[:, None, :] == TRUNK) | (branches[:, None, :] == branches[:, :, None])
    pictures = [picture for tree in trees for picture in tree.pictures]
    asks = [(row, index, asked) for row, tree in enumerate(trees) for index, asked in tree.asked]
    rows, columns, numbers = torch.tensor(ends, dtype=torch.long).reshape(-1, 3).unbind(1)
    return TreeBatch(
        ids,
        labels,
        weights,
        positions,
        (related & causal)[:, None],
        torch.cat([picture.features for picture in pictures]) if pictures else torch.zeros(0, hidden),
        (rows, columns),
        numbers,
        tuple(picture.content for picture in pictures),
        (torch.tensor([row for row, _, _ in asks]), torch.tensor([index for _, index, _ in asks])),
        tuple(asked for _, _, asked in asks),
    )
