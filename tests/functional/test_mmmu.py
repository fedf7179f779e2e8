"""MMMU end to end on made-up questions: prompts, a live server, scores, result files."""

from __future__ import annotations

import json

import pytest

from benchmarks import results
from benchmarks.functional import mmmu
from benchmarks.functional.mmmu_data import load
from tests.functional.records import write_jsonl


def kinds(message: dict) -> list[str]:
    return [part["type"] for part in message["content"]]


def texts(message: dict) -> str:
    return "".join(part.get("text", "|") for part in message["content"])


def test_images_stand_where_they_are_named_first_and_options_have_letters(tmp_path):
    choice, two, opened, *_ = load(write_jsonl(tmp_path))
    (message,) = mmmu.messages(choice, mmmu.as_picture)
    assert kinds(message) == ["text", "image", "text"]
    assert texts(message).startswith("Which colour has |?")
    assert "(A) red\n(B) blue\n(C) green" in texts(message)
    assert texts(message).endswith(mmmu.CHOOSE)
    (message,) = mmmu.messages(two, mmmu.as_picture)
    assert kinds(message).count("image") == 2
    assert "(A) <image 1>\n(B) <image 2>" in texts(message)
    (message,) = mmmu.messages(opened, mmmu.as_picture)
    assert texts(message).endswith(mmmu.PHRASE)


def test_a_server_is_asked_and_scored_by_subject(server, tmp_path, capsys):
    data = write_jsonl(tmp_path / "data")
    flags = [str(data), "--url", server.base_url, "--system", "rserve", "--max-tokens", "2"]
    assert mmmu.main([*flags, "--results", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["questions"] == 6
    assert set(printed) >= {"Art", "Music", "accuracy"}
    (result,) = results.measured(tmp_path)
    assert result.config["figure"] == "table1"
    assert result.config["system"] == "rserve"
    assert result.body["questions"] == 6
    assert result.body["subjects"]["Art"]["questions"] == 3
    assert len(result.body["said"]) == 6
    assert not any(answer.startswith("[") for answer in result.body["said"])


@pytest.mark.parametrize("flags", [["--url", "http://example.com"], []])
def test_what_cannot_be_done_is_one_line(flags, tmp_path, capsys):
    if flags:
        write_jsonl(tmp_path)
    assert mmmu.main([str(tmp_path), *flags]) == 1
    assert capsys.readouterr().err.startswith("mmmu: ")
