"""The entry to all measured parts: what it starts, and that one failure does not stop the rest."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.functional import held_out
from benchmarks.real import compare, fidelity, run, timelines

PARSERS = {
    "benchmarks.real.compare": compare.parse,
    "benchmarks.real.timelines": timelines.parse,
    "benchmarks.functional.held_out": held_out.parse,
}


@pytest.mark.parametrize(
    "flags", [[], ["--full"], ["--full", "--model-path", "/m"], ["--vllm-python", "p"], ["--resume"]]
)
def test_every_part_understands_its_arguments(flags):
    for part in run.parts(run.parse(flags)):
        if part.module in PARSERS:
            PARSERS[part.module](part.args)


def test_the_quick_form_is_the_default():
    quick, full = ({part.name: part.args for part in run.parts(run.parse(flags))} for flags in ([], ["--full"]))
    assert run.parts(run.parse(["--quick"])) == run.parts(run.parse([]))
    for parts, form, questions in ((quick, "quick", 200), (full, "full", 500)):
        assert compare.parse(parts["load"]).form == form
        assert held_out.parse(parts["table1"]).n == questions


def test_a_real_checkpoint_is_not_predicted_from_cpu_costs():
    names = [part.name for part in run.parts(run.parse(["--model-path", "/m"]))]
    assert names == ["load", "timelines", "table1"]
    everything = ["load", "fidelity", "timelines", "table1"]
    assert [part.name for part in run.parts(run.parse([]))] == everything


def test_a_part_that_fails_is_named_and_the_others_run(monkeypatch, capsys):
    started = []

    def fake(part):
        started.append(part.module)
        return int(part.name == "load")

    monkeypatch.setattr(run, "start", fake)
    assert run.main([]) == 1
    assert len(started) == 4
    assert "failed: load" in capsys.readouterr().err
    started.clear()
    assert run.main(["--only", "table1"]) == 0
    assert started == ["benchmarks.functional.held_out"]


def test_a_part_is_a_module_of_its_own():
    assert run.start(run.Part("x", "benchmarks.real.fidelity", ("--help",))) == 0
    assert run.start(run.Part("x", "benchmarks.real.fidelity", ("--no-such-flag",))) == 2


def test_a_prediction_without_measurements_is_one_line(tmp_path, capsys):
    assert fidelity.main(["--results", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("fidelity: ")


def test_importing_the_client_loads_no_torch():
    code = "import sys, benchmarks.real.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
