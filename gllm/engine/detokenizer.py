"""Output tokens to text as they come: no broken characters, stop strings found whatever tokens they are spread over."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gllm.errors import StartupError
from gllm.outputs import Delta, Logprob, PositionLogprobs
from gllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from gllm.worker.step import TokenLogprobs


class Vocabulary:
    """The bytes of every token of a byte-level BPE tokenizer. Raises StartupError for other kinds."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        backend = tokenizer.backend_tokenizer
        if type(backend.decoder).__name__ != "ByteLevel":
            raise StartupError("only byte-level BPE tokenizers (as Qwen's) are supported")
        alphabet = {char: byte for byte, char in enumerate(_byte_alphabet())}
        self._bytes = [b""] * (1 + max(backend.get_vocab(with_added_tokens=True).values()))
        for token, token_id in backend.get_vocab(with_added_tokens=True).items():
            try:
                self._bytes[token_id] = bytes([alphabet[char] for char in token])
            except KeyError:  # an added token, written as it is
                self._bytes[token_id] = token.encode("utf-8")
        self._special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.longest_token = max(map(len, self._bytes))

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for; nothing for ids that only pad the model's vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """The token alone as text; U+FFFD for bytes that are not UTF-8 by themselves."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special


class Detokenizer:
    """The text of one output. `push` takes tokens as they are sampled; all deltas joined are the tokenizer's decoding
    of all tokens, up to the stop string. Work a token is constant, however long the text and the stop strings are.

    eos_token_ids: the model's; they tell an EOS from the request's own stop tokens.
    """

    def __init__(self, vocabulary: Vocabulary, params: SamplingParams, eos_token_ids: Iterable[int] = ()) -> None:
        self._vocabulary = vocabulary
        self._params = params
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [_StopString(stop) for stop in params.stop]
        self._held = ""  # text not sent yet: it may be the beginning of a stop string
        self._num_tokens = 0
        self.finished = False

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None] | None = None,
        finish_reason: str | None = None,
    ) -> Delta:
        """What these tokens add. logprobs: one for each token. finish_reason: set with the last tokens.

        A Delta with finish_reason "stop" that was not passed in means that a stop string came: the request is to be
        aborted. Tokens behind the stop string, in this call or later ones, are dropped.
        """
        if self.finished:
            return Delta("")
        for index, token_id in enumerate(token_ids):
            last = finish_reason is not None and index == len(token_ids) - 1
            self._num_tokens += 1
            stop = self._scan(self._text(token_id, ends=last and finish_reason == "stop"))
            if stop is not None:
                return self._finish_by(stop, token_ids[: index + 1], logprobs)
        positions = self._positions(len(token_ids), logprobs)
        if finish_reason is None:
            cut = len(self._held) - max((stop.matched for stop in self._stops), default=0)
            text, self._held = self._held[:cut], self._held[cut:]
            return Delta(text, tuple(token_ids), positions)
        text, self._held, self.finished = self._held + self._utf8.decode(b"", final=True), "", True
        return Delta(text, tuple(token_ids), positions, finish_reason, self._stop_token(token_ids, finish_reason))

    def _text(self, token_id: int, ends: bool) -> str:
        """ends: the token ended the output, so it is not part of the text (unless asked for)."""
        if ends and not self._params.include_stop_str_in_output:
            return ""
        if self._params.skip_special_tokens and self._vocabulary.is_special(token_id):
            return ""
        return self._utf8.decode(self._vocabulary.token_bytes(token_id))

    def _scan(self, text: str) -> str | None:
        """Hold `text`; the stop string that it completes, the first to end (the longest of those), if any."""
        if not self._stops:
            self._held += text
            return None
        for index, char in enumerate(text):
            complete = [stop.text for stop in self._stops if stop.feed(char)]
            if complete and self._num_tokens > self._params.min_tokens:
                self._held += text[: index + 1]
                return max(complete, key=len)
        self._held += text
        return None

    def _finish_by(self, stop: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None] | None) -> Delta:
        text = self._held if self._params.include_stop_str_in_output else self._held[: len(self._held) - len(stop)]
        self._held, self.finished = "", True
        return Delta(text, tuple(token_ids), self._positions(len(token_ids), logprobs), "stop", stop)

    def _stop_token(self, token_ids: Sequence[int], finish_reason: str) -> int | None:
        if finish_reason != "stop" or not token_ids:
            return None
        last = token_ids[-1]
        return last if last in self._params.stop_token_ids and last not in self._eos else None

    def _positions(
        self, count: int, logprobs: Sequence[TokenLogprobs | None] | None
    ) -> tuple[PositionLogprobs, ...] | None:
        if logprobs is None or self._params.logprobs is None:
            return None
        return tuple(self._position(position) for position in logprobs[:count] if position is not None)

    def _position(self, position: TokenLogprobs) -> PositionLogprobs:
        chosen, *top = (
            Logprob(token_id, logprob, self._vocabulary.token_text(token_id))
            for token_id, logprob in zip(position.token_ids, position.logprobs, strict=True)
        )
        return PositionLogprobs(chosen, tuple(top))


class _StopString:
    """Knuth-Morris-Pratt over a stream: `matched` characters of `text` are the longest that the stream ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * (len(text) + 1)
        for length in range(2, len(text) + 1):
            self._fallback[length] = self._step(self._fallback[length - 1], text[length - 1])

    def feed(self, char: str) -> bool:
        """Whether `char` completes the stop string."""
        self.matched = self._step(self.matched, char)
        complete = self.matched == len(self.text)
        if complete:
            self.matched = self._fallback[self.matched]
        return complete

    def _step(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._fallback[matched]
        return matched + (self.text[matched] == char)


def _byte_alphabet() -> list[str]:
    """The character that byte-level BPE writes for each byte: printable Latin-1 as itself, the others from U+0100."""
    alphabet, others = [], 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(0x100 + others))
            others += 1
    return alphabet
