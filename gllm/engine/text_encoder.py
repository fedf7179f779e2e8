"""Text to token ids, where special tokens count only in text that may hold them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gllm.engine.chat import Piece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TextEncoder:
    """Encodes pieces as the tokenizer encodes their concatenation, except that special tokens in untrusted pieces, or
    across the border of one, are ordinary characters. Safe to use from several threads.

    control_ids: further added tokens to be treated as special, whatever the tokenizer's files call them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, control_ids: Iterable[int] = ()) -> None:
        from tokenizers import Tokenizer

        state = json.loads(tokenizer.backend_tokenizer.to_str())
        control = set(control_ids)
        self._special: dict[str, int] = {}
        for token in state["added_tokens"]:
            token["special"] = token["special"] or token["id"] in control
            if token["special"]:
                self._special[token["content"]] = token["id"]
        # A tokenizer of our own, blind to special tokens: the switch of a shared one would not be safe across threads.
        self._plain = Tokenizer.from_str(json.dumps(state))
        self._plain.encode_special_tokens = True
        self._plain.no_truncation()
        self._plain.no_padding()
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, pieces: Sequence[Piece]) -> list[int]:
        """Token ids. Takes about half a second a megabyte, without the interpreter's lock (`encode` would keep it)."""
        runs: list[str | int] = [""]  # neighbours join, so that words are cut as in the whole text
        for piece in pieces:
            for part in self._split(piece):
                if isinstance(part, str) and isinstance(runs[-1], str):
                    runs[-1] += part
                else:
                    runs.append(part)
        texts = [run for run in runs if isinstance(run, str)]
        encoded = iter(self._plain.encode_batch_fast(texts, add_special_tokens=False))
        ids: list[int] = []
        for run in runs:
            if isinstance(run, str):
                ids += next(encoded).ids
            else:
                ids.append(run)
        return ids

    def holds_special(self, text: str) -> bool:
        return self._pattern.search(text) is not None

    def _split(self, piece: Piece) -> Iterable[str | int]:
        if not piece.trusted:
            yield piece.text
            return
        position = 0
        for match in self._pattern.finditer(piece.text):
            yield piece.text[position : match.start()]
            yield self._special[match[0]]
            position = match.end()
        yield piece.text[position:]
