"""The demo's tokenizer: byte-level BPE on Qwen2's pre-tokeniser, one token a word of the questions, any UTF-8 text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from benchmarks.demo_model.pictures import COLOURS, DIGITS, SHAPES
from benchmarks.demo_model.questions import GREETING_ANSWER, GREETINGS, SINGLE_WORDINGS, WORDINGS, with_article

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
DEFAULT_SYSTEM = "You are a helpful assistant."
MAX_LENGTH = 32768
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def _words() -> Iterator[str]:
    """Every word that the questions, answers and roles use, as a text of its own."""
    texts = [DEFAULT_SYSTEM, GREETING_ANSWER, "Picture Image", *GREETINGS]
    texts += itertools.chain.from_iterable([*WORDINGS.values(), *SINGLE_WORDINGS.values()])
    names = [*SHAPES, *COLOURS, "system", "user", "assistant", "yes", "no", "a", "an", "color", "image", "images"]
    texts += [*names, *(with_article(name) for name in names), *DIGITS]
    for text in texts:
        for word in text.replace("{", " ").replace("}", " ").split():
            bare = word.strip("?!.,")
            yield from (bare, f" {bare}", bare.capitalize())


def build_tokenizer() -> Qwen2Tokenizer:
    """Trains the tokenizer on the questions' words and gives it Qwen2.5-VL's special tokens and the chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator(sorted(set(_words())), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return Qwen2Tokenizer(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        bos_token=None,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
    )
