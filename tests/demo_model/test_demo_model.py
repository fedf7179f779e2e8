"""The bundled demo checkpoint: its questions, its tokenizer, its chat template, and its answers in transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.demo_model.evaluate import BUNDLED, Reference
from benchmarks.demo_model.pictures import CONTENTS, MAX_SIDE, MIN_SIDE, draw
from benchmarks.demo_model.questions import KINDS, Question, held_out, is_right

torch = pytest.importorskip("torch")
MEGABYTES_ALLOWED = 12


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(BUNDLED)


def flat_text(question: Question) -> str:
    return json.dumps(question.messages, default=lambda picture: list(picture.size))


class TestQuestions:
    def test_same_seed_same_questions(self) -> None:
        once, again = held_out(12, seed=5), held_out(12, seed=5)
        for first, second in zip(once, again, strict=True):
            assert (flat_text(first), first.answer) == (flat_text(second), second.answer)
            for picture, twin in zip(first.pictures, second.pictures, strict=True):
                assert np.array_equal(np.asarray(picture), np.asarray(twin))

    def test_a_question_does_not_depend_on_how_many_are_asked(self) -> None:
        assert [flat_text(q) for q in held_out(3, seed=1)] == [flat_text(q) for q in held_out(9, seed=1)[:3]]

    def test_other_seed_other_questions(self) -> None:
        assert [flat_text(q) for q in held_out(5, seed=1)] != [flat_text(q) for q in held_out(5, seed=2)]

    def test_limits_hold(self) -> None:
        asked = held_out(60, seed=3, min_pictures=2, max_pictures=8, max_turns=2, sides=(60, 90))
        assert {len(question.pictures) for question in asked} == set(range(2, 9))
        assert {question.num_turns for question in asked} == {1, 2}
        assert all(60 <= side <= 90 for question in asked for picture in question.pictures for side in picture.size)

    def test_parts_hold_the_pictures_in_order(self) -> None:
        for question in held_out(20, seed=4):
            parts = [p for m in question.messages if not isinstance(m["content"], str) for p in m["content"]]
            images = [part["image"] for part in parts if part["type"] == "image"]
            assert [id(image) for image in images] == [id(picture) for picture in question.pictures]
            assert question.messages[-1]["role"] == "user"

    def test_every_kind_is_asked(self) -> None:
        assert {question.kind for question in held_out(120, seed=0, sides=(56, 60))} == set(KINDS)

    @pytest.mark.parametrize("size", [(MIN_SIDE, MIN_SIDE), (MIN_SIDE, MAX_SIDE), (MAX_SIDE, MAX_SIDE), (57, 131)])
    def test_every_size_can_be_drawn(self, size: tuple[int, int]) -> None:
        rng = np.random.default_rng(0)
        assert all(draw(rng, content, *size).size == size for content in CONTENTS[::37])

    def test_generator_needs_no_torch(self) -> None:
        code = "import sys, benchmarks.demo_model.questions; assert not {'torch', 'transformers'} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=BUNDLED.parents[2])


class TestTokenizer:
    @settings(max_examples=150, deadline=None)
    @given(text=st.text())
    def test_any_text_comes_back(self, reference: Reference, text: str) -> None:
        ids = reference.tokenizer(text, split_special_tokens=True)["input_ids"]
        assert reference.tokenizer.decode(ids) == unicodedata.normalize("NFC", text)

    def test_typed_special_tokens_stay_text(self, reference: Reference) -> None:
        tokenizer = reference.tokenizer
        text = "a <|image_pad|> and <|im_end|> typed by a user"
        ids = tokenizer(text, split_special_tokens=True)["input_ids"]
        assert not set(ids) & set(tokenizer.all_special_ids)
        assert tokenizer.decode(ids) == text

    def test_config_points_at_the_right_tokens(self, reference: Reference) -> None:
        config, tokenizer = reference.model.config, reference.tokenizer
        named = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
        named |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
        for field, token in named.items():
            assert tokenizer.convert_tokens_to_ids(token) == getattr(config, field)
        ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
        assert reference.model.generation_config.eos_token_id == ends
        assert tokenizer.eos_token_id == ends[0]
        assert len(tokenizer) <= config.text_config.vocab_size


class TestTemplate:
    PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"

    def render(self, reference: Reference, messages: list[dict[str, object]], **options: object) -> str:
        return str(reference.tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def test_pictures_are_counted_over_turns(self, reference: Reference) -> None:
        messages = [
            {"role": "user", "content": [{"type": "image"}, {"type": "image_url", "image_url": {"url": "x"}}]},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": [{"type": "text", "text": " look "}, {"type": "image"}]},
        ]
        assert self.render(reference, messages, add_generation_prompt=True) == (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\nPicture 1: {self.PICTURE}Picture 2: {self.PICTURE}<|im_end|>\n"
            "<|im_start|>assistant\nok<|im_end|>\n"
            f"<|im_start|>user\n look \nPicture 3: {self.PICTURE}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    def test_labels_can_be_left_out(self, reference: Reference) -> None:
        messages = [{"role": "user", "content": [{"type": "image"}]}]
        assert "Picture" not in self.render(reference, messages, add_vision_id=False)

    def test_own_system_message_and_verbatim_text(self, reference: Reference) -> None:
        text = "  {{ 7 * 7 }} \n\t<b> "
        messages = [{"role": "system", "content": "S"}, {"role": "user", "content": text}]
        assert self.render(reference, messages) == (
            f"<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n"
        )


class TestCheckpoint:
    def test_is_small(self) -> None:
        assert sum(file.stat().st_size for file in BUNDLED.iterdir()) < MEGABYTES_ALLOWED * 2**20

    def test_some_pictures_have_several_windows(self, reference: Reference) -> None:
        vision = reference.model.config.vision_config
        assert MIN_SIDE <= vision.window_size < MAX_SIDE
        assert 0 < len(vision.fullatt_block_indexes) < vision.depth

    def test_answers_held_out_questions(self, reference: Reference) -> None:
        asked = held_out(25, seed=7, max_pictures=8)
        right = [is_right(question, reference.answer(question)) for question in asked]
        assert sum(right) >= 24

    @torch.inference_mode()
    def test_long_context_gives_finite_logits(self, reference: Reference) -> None:
        ids = torch.randint(256, (1, 4000), generator=torch.Generator().manual_seed(0))
        assert torch.isfinite(reference.model(input_ids=ids, logits_to_keep=1).logits).all()
