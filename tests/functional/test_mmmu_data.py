"""Reading MMMU's questions, and telling right answers from wrong ones."""

from __future__ import annotations

import json
import sys
import types

import pytest

from benchmarks.functional import mmmu_data
from benchmarks.functional.mmmu_answers import chosen_letter, is_right, matches
from benchmarks.functional.mmmu_data import load, question_of
from tests.functional.records import png, record, write_jsonl

OPTIONS = ("a cat", "a dog", "The cat and dog", "none")


def test_jsonl_is_read_with_its_images_by_subject(tmp_path):
    questions = load(write_jsonl(tmp_path))
    assert [q.subject for q in questions] == ["Art"] * 3 + ["Music"] * 3
    assert questions[0].options == ("red", "blue", "green")
    assert questions[1].options == ("<image 1>", "<image 2>")
    assert questions[2].options == ()
    assert questions[2].answers == ("4",)
    assert questions[1].images[2].getpixel((0, 0)) == (255, 0, 0)


def test_a_file_named_by_its_subject(tmp_path):
    (tmp_path / "blue.png").write_bytes(png("blue"))
    (tmp_path / "Physics.jsonl").write_text(json.dumps(record(1)) + "\n")
    assert [q.subject for q in load(tmp_path)] == ["Physics"]


def test_parquet_is_read_through_pyarrow_and_without_it_the_error_says_so(tmp_path, monkeypatch):
    home = tmp_path / "Art"
    home.mkdir()
    (home / "validation-00000-of-00001.parquet").write_bytes(b"")
    monkeypatch.setattr(mmmu_data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="need pyarrow"):
        load(tmp_path)
    rows = [record(1, image_1={"bytes": png("blue"), "path": "x.png"}, image_2=None)]
    table = types.SimpleNamespace(to_pylist=lambda: rows)
    fake = types.SimpleNamespace(read_table=lambda path: table)
    monkeypatch.setattr(mmmu_data.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "pyarrow", types.SimpleNamespace(parquet=fake))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", fake)
    (question,) = load(tmp_path)
    assert question.subject == "Art"
    assert question.images[1].getpixel((0, 0)) == (0, 0, 255)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"options": "['only one']"}, "1 options"),
        ({"question": "see <image 3>"}, "names image 3"),
        ({"image_1": "missing.png"}, "missing.png"),
    ],
)
def test_a_malformed_record_is_an_error_that_says_what(fields, words, tmp_path):
    (tmp_path / "blue.png").write_bytes(png("blue"))
    with pytest.raises((ValueError, OSError), match=words):
        question_of(record(1, **fields), "Art", tmp_path)


def test_an_error_names_file_and_line(tmp_path):
    (tmp_path / "Art.jsonl").write_text("\n{\n")
    with pytest.raises(ValueError, match=r"Art.jsonl, line 2"):
        load(tmp_path)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no questions"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        ("B", "B"),
        ("b.", "B"),
        ("(C)", "C"),
        ("The answer is (B).", "B"),
        ("Answer: A", "A"),
        ("Of (A) and (B), the correct option is D", "D"),
        ("A. a cat", "A"),
        ("I think of a dog", "B"),
        ("It shows a cat and a dog", None),
        ("A man stands there", None),
        ("**Final answer**\nB", "B"),
        ("", None),
        ("E", None),
    ],
)
def test_the_letter_that_was_meant(said, letter):
    assert chosen_letter(said, OPTIONS) == letter


@pytest.mark.parametrize(
    ("answer", "said", "right"),
    [
        ("4", "4", True),
        ("4", "There are 4 corners.", True),
        ("4", "14", False),
        ("0.33", "1/3 = 0.333", True),
        ("1000", "The total is 1,000 dollars", True),
        ("4", "2 + 2 = 5", False),
        ("blue", "It is Blue.", True),
        ("blue", "bluebell", False),
        ("tidal wave", "so the answer is Tidal  Wave", True),
    ],
)
def test_open_answers(answer, said, right):
    assert matches(answer, said) is right


def test_one_of_several_answers_is_enough(tmp_path):
    (tmp_path / "blue.png").write_bytes(png("blue"))
    fields = {"options": "[]", "question_type": "open", "answer": "['four', '4']"}
    question = question_of(record(1, **fields), "Art", tmp_path)
    assert is_right(question, "four")
    assert is_right(question, "4")
    assert not is_right(question, "five")
