"""A request's messages or prompt to token ids with one placeholder an item, and from there to the laid-out prompt.

Reads no item: `Prompt.sources` go to the media loader, and `Processor.layout` takes the grids that come back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gllm.config import EngineConfig, ModelInfo
from gllm.core.request import Item
from gllm.engine.chat import Piece, read_messages
from gllm.engine.detokenizer import Vocabulary
from gllm.engine.text_encoder import TextEncoder
from gllm.errors import BadRequest, StartupError
from gllm.media.processor import Grid, ImageProcessor
from gllm.media.source import Source
from gllm.sampling_params import SamplingParams

_MAX_TEMPLATE_VALUE = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """token_ids: the prompt with ONE placeholder for each item, at `placeholders` (rising positions).
    sources: the items, in the order of their placeholders. text: for reporting; None when ids were given."""

    token_ids: tuple[int, ...]
    placeholders: tuple[int, ...] = ()
    sources: tuple[Source, ...] = ()
    text: str | None = None

    @property
    def num_text_tokens(self) -> int:
        return len(self.token_ids) - len(self.placeholders)


class Processor:
    """Tokenizer, chat template and image sizes of one checkpoint. All methods are safe to call from several threads;
    `chat` and `completion` take time in proportion to the text: call them off the event loop.

    Raises StartupError when the checkpoint's tokenizer cannot be used.
    """

    def __init__(self, checkpoint: Path, info: ModelInfo, config: EngineConfig) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any  # a PreTrainedTokenizerFast
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(str(checkpoint), local_files_only=True)
        except (OSError, ValueError) as error:
            raise StartupError(f"the tokenizer of the checkpoint cannot be loaded: {error}") from None
        if not self.tokenizer.is_fast:
            raise StartupError("the checkpoint's tokenizer has no fast (Rust) form")
        self.vocabulary = Vocabulary(self.tokenizer)
        self.images = ImageProcessor(checkpoint, config.mm_processor_kwargs)
        self._info = info
        self._limit = config.limit_mm_per_prompt.get("image")
        self._max_tokens = min(info.context_length, config.max_model_len or info.context_length)
        control = (*info.eos_token_ids, info.image_token_id)
        self._encoder = TextEncoder(self.tokenizer, [token_id for token_id in control if token_id is not None])
        self._template = _read_template(checkpoint) or self.tokenizer.chat_template

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        trusted: bool = False,
    ) -> Prompt:
        """OpenAI messages -> Prompt; text in them is text, whatever it spells. trusted: see `read_messages`.

        Raises BadRequest.
        """
        template = self._chat_template()
        values = self._template_values(template, chat_template_kwargs or {})
        takes_lists = self._info.image_token_id is not None
        chat = read_messages(messages, trusted=trusted, takes_lists=takes_lists)
        self._check_count(len(chat.sources), "messages")
        pieces = chat.pieces(
            lambda marked: self.tokenizer.apply_chat_template(
                marked, chat_template=template, add_generation_prompt=add_generation_prompt, tokenize=False, **values
            )
        )
        return self._prompt(self._encode(pieces), chat.sources, "".join(piece.text for piece in pieces), "messages")

    def completion(self, prompt: str | Sequence[int], images: Sequence[Any] = (), *, trusted: bool = False) -> Prompt:
        """A prompt as it is: special tokens in a string count, and every image needs one placeholder of its own.

        images: as `Source.value`. trusted: paths and Pillow images are allowed. Raises BadRequest.
        """
        sources = [Source(image, trusted=trusted) for image in images]
        self._check_count(len(sources), "prompt")
        if isinstance(prompt, str):
            return self._prompt(self._encode([Piece(prompt, trusted=True)]), sources, prompt, "prompt")
        return self._prompt(self._check_ids(prompt), sources, None, "prompt")

    def layout(self, prompt: Prompt, grids: Sequence[Grid]) -> tuple[tuple[int, ...], tuple[Item, ...]]:
        """Every token position of the prompt: (token_ids, items), each item's placeholder repeated num_tokens times."""
        ids: list[int] = []
        items: list[Item] = []
        copied = 0
        for position, grid in zip(prompt.placeholders, grids, strict=True):
            ids += prompt.token_ids[copied:position]
            item = Item(len(ids), self.images.num_tokens(grid), grid)
            ids += [prompt.token_ids[position]] * item.num_tokens
            items.append(item)
            copied = position + 1
        ids += prompt.token_ids[copied:]
        return tuple(ids), tuple(items)

    def _prompt(self, ids: Sequence[int], sources: Sequence[Source], text: str | None, param: str) -> Prompt:
        if not ids:
            raise BadRequest("the prompt is empty", param=param)
        pad = self._info.image_token_id
        placeholders = tuple(position for position, token_id in enumerate(ids) if token_id == pad)
        if len(placeholders) != len(sources):
            raise BadRequest(
                f"the prompt has {_count(len(placeholders), 'image placeholder')} but the request has "
                f"{_count(len(sources), 'image')}; each image needs exactly one",
                param=param,
            )
        return Prompt(tuple(ids), placeholders, tuple(sources), text)

    def _encode(self, pieces: Sequence[Piece]) -> list[int]:
        self._check_text(pieces)
        return self._encoder.encode(pieces)

    def _check_text(self, pieces: Sequence[Piece]) -> None:
        """Refuse what cannot fit before time is spent on it: no token is longer than the longest token."""
        for piece in pieces:
            try:
                piece.text.encode("utf-8")
            except UnicodeEncodeError:
                raise BadRequest("text with a lone surrogate is not Unicode", param="messages") from None
        at_least = sum(len(piece.text) for piece in pieces) // self.vocabulary.longest_token
        if at_least > self._max_tokens:
            raise BadRequest(
                f"this model's context length is {self._max_tokens} tokens; the text alone has more than {at_least}",
                code="context_length_exceeded",
            )

    def _check_ids(self, ids: Sequence[int]) -> Sequence[int]:
        size = self._info.vocab_size
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < size:
                raise BadRequest(f"token ids must be whole numbers from 0 to {size - 1}, got {token_id!r:.40}")
        return ids

    def _check_count(self, count: int, param: str) -> None:
        if count and self._info.image_token_id is None:
            raise BadRequest("this model takes no images", param=param)
        if self._limit is not None and count > self._limit:
            raise BadRequest(f"{_count(count, 'image')}; at most {self._limit} are allowed in a request", param=param)

    def _chat_template(self) -> str:
        template = self._template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise BadRequest("this model has no chat template: use /v1/completions or LLM.generate")
        return template

    def _template_values(self, template: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Settings of the template by the client, e.g. add_vision_id. They become text that counts as the template's,
        so no special token may come in with them."""
        param = "chat_template_kwargs"
        for name, value in values.items():
            known = isinstance(name, str) and name.isidentifier() and re.search(rf"\b{name}\b", template)
            if not known or name in _RESERVED_VALUES:
                raise BadRequest(f"the chat template has no setting {name!r:.40}", param=param)
            if not isinstance(value, str | bool | int | float | None):
                raise BadRequest(f"{param}.{name} must be a string, a number or a boolean", param=param)
            if isinstance(value, str) and (len(value) > _MAX_TEMPLATE_VALUE or self._encoder.holds_special(value)):
                raise BadRequest(f"{param}.{name} is too long or holds a special token", param=param)
        return dict(values)


_RESERVED_VALUES = {
    "messages", "tools", "documents", "conversation", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens", "self", "raise_exception",
    "strftime_now", "bos_token", "eos_token", "pad_token", "unk_token",
}  # fmt: skip


def check_length(num_text: int, num_item: int, max_model_len: int, params: SamplingParams) -> int:
    """The most tokens that may be put out: params.max_tokens, cut to what the context leaves.

    num_text, num_item: tokens of the prompt outside and inside items. Raises BadRequest when nothing is left.
    """
    left = max_model_len - num_text - num_item
    if left < 1:
        raise BadRequest(
            f"this model's context length is {max_model_len} tokens; the prompt has {num_text + num_item} "
            f"({num_text} of text and {num_item} of images) and leaves no room for output",
            code="context_length_exceeded",
        )
    return left if params.max_tokens is None else min(params.max_tokens, left)


def check_items(items: Sequence[Item], embedding_capacity: int) -> None:
    """Raises BadRequest for an item whose embeddings can never be held at once."""
    for index, item in enumerate(items, start=1):
        if item.num_tokens > embedding_capacity:
            raise BadRequest(
                f"image {index}: its {item.num_tokens} tokens are more than the embedding capacity of "
                f"{embedding_capacity}",
                param="image",
            )


def _read_template(checkpoint: Path) -> str | None:
    """The chat template that stands beside the tokenizer: a multimodal checkpoint's own goes first."""
    jinja, older = checkpoint / "chat_template.jinja", checkpoint / "chat_template.json"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    if older.is_file():
        template = json.loads(older.read_text(encoding="utf-8")).get("chat_template")
        return template if isinstance(template, str) else None
    return None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
