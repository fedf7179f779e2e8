"""Table 1 at the demo's scale: what is written, and when answers count as the same. The engine's own tests prove the
schemes equal; here two of them answer a handful of questions."""

from __future__ import annotations

from dataclasses import replace

from benchmarks import results
from benchmarks.demo_model.questions import held_out
from benchmarks.functional import answers
from benchmarks.functional import held_out as table


def test_a_scheme_answers_as_the_reference_and_files_are_written(tmp_path, monkeypatch):
    questions = held_out(4, 0)
    truth = [question.answer for question in questions]
    monkeypatch.setattr(table, "ask_transformers", lambda asked: truth)
    monkeypatch.setattr(table, "ask", lambda scheme, asked: truth if scheme == "gllm" else [*truth[:-1], "wrong"])
    flags = ["-n", "4", "--results", str(tmp_path), "--schemes"]
    assert table.main([*flags, "gllm"]) == 0
    assert table.main([*flags, "gllm", "rserve"]) == 1
    found = {result.config["system"]: result for result in results.measured(tmp_path)}
    assert set(found) == {"transformers", "gllm", "rserve"}
    assert found["transformers"].body["answers_digest"] == found["gllm"].body["answers_digest"]
    assert found["rserve"].body["answers_digest"] != found["gllm"].body["answers_digest"]
    assert (found["rserve"].body["correct"], found["rserve"].body["differing"]) == (3, 1)
    assert all(result.config["figure"] == "table1" and result.kind == "measured" for result in found.values())


def test_a_question_that_fails_has_its_reason_for_an_answer_and_no_other_is_touched():
    good, bad = held_out(2, 0)
    broken = replace(bad, messages=[{"role": "user", "content": [{"type": "image", "image": "no-such-file.png"}]}])
    said = table.ask("gllm", [good, broken])
    assert not said[0].startswith("[")
    assert said[1].startswith("[image 1")


def test_the_digest_tells_order_and_content():
    assert answers.digest(["a", "b"]) == answers.digest(["a", "b"])
    assert len({answers.digest(each) for each in (["a", "b"], ["b", "a"], ["ab"], [])}) == 4
