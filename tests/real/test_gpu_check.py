"""The GPU check's own logic, without a GPU: what is skipped, what fails, and what its lines say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.real import gpu_check
from benchmarks.real.dummy import config_json, published_7b, tiny
from benchmarks.real.flops import attention_flops, encode_flops, prefill_flops
from benchmarks.real.gpu_correct import Failed, Unable
from gllm.models.config import text_config, vision_config


def run_with(monkeypatch, **changed):
    """The line of the shortest check, with some of its fields changed in this process alone."""
    name = "conformance-sdpa"
    monkeypatch.setitem(gpu_check.CHECKS, name, replace(gpu_check.CHECKS[name], **changed))
    return gpu_check.run_check(name, True, 400.0)


def test_a_check_runs_in_a_process_of_its_own_and_passes(monkeypatch):
    line = run_with(monkeypatch)
    assert line["status"] == "pass"
    assert line["largest_difference"]["float32"] < 2e-3


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(gpu_check, "find_spec", lambda name: None if name in ("zmq", "msgspec") else object())
    assert gpu_check.run_check("scheme-rserve", True, 400.0) == {
        "check": "scheme-rserve", "status": "skip", "reason": "not installed: pyzmq, msgspec",
    }  # fmt: skip


def test_a_check_that_hangs_is_ended_and_fails(monkeypatch):
    line = run_with(monkeypatch, limit=0.05)
    assert (line["status"], line["reason"]) == ("fail", "not done after 0 seconds")


def test_a_check_without_time_left_is_skipped():
    line = gpu_check.run_check("conformance-sdpa", True, 5.0)
    assert (line["status"], line["reason"]) == ("skip", "5 of the 465 seconds are left")


def test_a_check_whose_process_dies_fails_with_its_last_words(monkeypatch):
    monkeypatch.setitem(gpu_check.CHECKS, "unknown there", gpu_check.CHECKS["conformance-sdpa"])
    line = gpu_check.run_check("unknown there", True, 400.0)
    assert (line["status"], line["reason"]) == ("fail", "ended with status 2")
    assert "invalid choice" in line["tail"]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Unable("no such page size"), {"status": "skip", "reason": "no such page size"}),
        (Failed("0.5 off", {"off": 0.5}), {"status": "fail", "reason": "0.5 off", "off": 0.5}),
    ],
)
def test_what_a_check_raises_becomes_its_line(monkeypatch, error, line):
    def raising(backend, is_tiny):
        raise error

    monkeypatch.setattr("benchmarks.real.gpu_correct.conformance", raising)
    assert gpu_check.perform("conformance-sdpa", False) == line


def test_the_summary_and_the_exit_status(monkeypatch, capsys):
    lines = {
        "flops": {"check": "flops", "status": "pass", "prefill": {"share": 0.6}, "matrix_tflops": 700.0},
        "scheme-rserve": {"check": "scheme-rserve", "status": "pass", "ttft_median_s": 0.2, "input_tokens_per_s": 9.0},
        "tokens": {"check": "tokens", "status": "fail", "reason": "other tokens"},
        "conformance-flash": {"check": "conformance-flash", "status": "skip", "reason": "not installed: flash-attn"},
    }
    monkeypatch.setattr(gpu_check, "run_check", lambda name, tiny, left: lines[name])
    monkeypatch.setattr(gpu_check, "machine", lambda: {"gpu": "a GPU"})
    assert gpu_check.check_all(list(lines), False) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["pass"] == ["flops", "scheme-rserve"]
    assert summary["fail"] == ["tokens"]
    assert summary["skip"] == ["conformance-flash"]
    assert not summary["dry_run"]
    assert summary["figures"] == {
        "prefill_share": 0.6, "scheme-rserve_ttft_median_s": 0.2, "scheme-rserve_input_tokens_per_s": 9.0,
    }  # fmt: skip
    del lines["tokens"]
    assert gpu_check.check_all(list(lines), False) == 0


def test_the_dummy_7b_has_the_published_sizes():
    raw = config_json(published_7b())
    text, vision = text_config(raw), vision_config(raw)
    assert (text.hidden_size, text.num_layers, text.num_heads, text.num_kv_heads) == (3584, 28, 28, 4)
    assert (text.head_dim, text.intermediate_size, text.vocab_size) == (128, 18944, 152064)
    assert text.mrope_sections == (16, 24, 24)
    assert (vision.depth, vision.hidden_size, vision.num_heads, vision.intermediate_size) == (32, 1280, 16, 3420)
    assert (vision.full_attention_layers, vision.out_hidden_size) == ({7, 15, 23, 31}, 3584)


def test_flops_of_a_model_small_enough_to_count():
    model = tiny()
    layer = 224 * 32 * (7 + 1 + 1 + 7) + 3 * 224 * 256  # q, k, v and out; gate, up and down
    assert prefill_flops(model, 1) == 2 * (2 * layer + 4 * 7 * 32) + 2 * 224 * 1024
    assert attention_flops(2, 3, heads=1, head_dim=8) == 4 * 8 * (2 + 3)
    one, two = encode_flops(model, [(1, 4, 4)]), encode_flops(model, [(1, 4, 8)])
    assert two - 2 * one == 4 * 64 * (32 * 32 - 2 * 16 * 16)  # all else is linear in patches
