"""Figures as commands: names, rows, files, what is missing, and measured results slotting in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.figures import budget, fidelity, fig02, fig05, fig10, fig14, measured, table1, timeline
from benchmarks.figures.frame import Row, near, table
from benchmarks.figures.points import MissingResult, Point, event_log, load, need, run_all, run_and_write
from benchmarks.figures.run import FIGURES, figure, main
from benchmarks.results import Result
from benchmarks.systems import deploy
from gllm.core import eventlog

ROOT = Path(__file__).parents[2]
POINT = Point(deployment=deploy("rserve", "PP4"), workload="1K", rate=0.5, num_requests=5)


def result(system: str, rate: float, ttft: float, seed: int = 0, **config) -> Result:
    config = {"figure": "measured", "system": system, "workload": "mix", "rate": rate, "devices": "2 cores"} | config
    return Result(kind="measured", name=f"{system}-{rate}-{seed}", config=config, seed=seed, commit="c",
                  machine="a test", body={"summary": {"ttft_mean": ttft}})  # fmt: skip


def test_every_figure_has_its_module_and_is_named():
    for name in FIGURES:
        module = figure(name)
        assert callable(module.points)
        assert callable(module.draw)
    issue = {"2", "5", "7", "10", "12", "13", "14", "16", "17", "18", "19", "20", "a100", "table1"}
    assert issue <= set(FIGURES)


def test_an_unknown_figure_lists_the_known_ones(capsys):
    assert main(["--sim-only", "--figure", "99"]) == 2
    assert "unknown figure '99'; known: 2, 5, 7, 10, 12" in capsys.readouterr().err


def test_two_runs_with_one_seed_write_the_same_bytes(tmp_path):
    for folder in ("a", "b"):
        run_and_write(tmp_path / folder, POINT)
    first, second = (next((tmp_path / folder).rglob("*.json")).read_bytes() for folder in ("a", "b"))
    assert first == second
    stored = json.loads(first)
    assert stored["kind"] == "simulated"
    assert stored["machine"] == "simulated: 5 x h100-sxm"
    assert {"config", "seed", "commit", "sources", "body"} <= stored.keys()


def test_a_result_of_other_code_is_made_again(tmp_path, monkeypatch):
    run_and_write(tmp_path, POINT)
    assert load(tmp_path, POINT) is not None
    monkeypatch.setattr(results, "sources", lambda: "other code")
    assert load(tmp_path, POINT) is None
    with pytest.raises(MissingResult, match=r"no current result of 1K/rserve-PP4-E1-0\.5-s0"):
        need(tmp_path, POINT)


def test_what_an_interrupted_run_left_is_drawn_and_the_rest_is_named(tmp_path, monkeypatch, capsys):
    def interrupted(folder, points):
        run_all(folder, fig05.points(), workers=1)
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.figures.run.run_all", interrupted)
    assert main(["--sim-only", "--figure", "5", "--figure", "10", "--results", str(tmp_path)]) == 130
    rows = json.loads((tmp_path / "summary.json").read_text())
    assert (tmp_path / "fig5.png").exists()
    assert [row["claim"] for row in rows if row["figure"] == "10"] == ["not drawn"]
    assert "2 of 2 runs are missing" in capsys.readouterr().out


def test_the_command_writes_pictures_numbers_and_the_summary(tmp_path):
    script = str(ROOT / "benchmarks" / "run_all.sh")
    answer = subprocess.run(
        ["bash", script, "--sim-only", "--figure", "5", "--results", str(tmp_path)],
        capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
    )  # fmt: skip
    assert "llm_efficiency = " in answer.stdout
    assert "fitted to figure 13" in answer.stdout
    rows = json.loads((tmp_path / "summary.json").read_text())
    assert {"figure", "claim", "paper", "ours", "holds", "kind", "devices"} <= rows[0].keys()
    assert {row["figure"] for row in rows} == {"5"}
    assert [row["kind"] for row in rows] == ["simulated", "simulated", "measured"]
    assert all(row["devices"] for row in rows if row["kind"] == "simulated")
    assert {p.name for p in tmp_path.iterdir()} >= {"fig5.png", "fig5.json", "summary.json"}


def test_missing_vllm_and_missing_measured_runs_are_named_rows(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("benchmarks.figures.run.exists", lambda module: False)
    assert main(["--figure", "table1", "--results", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "summary.json").read_text())
    skipped = [row for row in rows if row["ours"] == "skipped"]
    assert [row["note"] for row in skipped] == ["no --vllm-python", "this checkout has no benchmarks.real.run"]
    assert all(row["holds"] is None for row in rows)


def test_measured_results_slot_in(tmp_path):
    for seed in range(3):
        for system, ttft in (("rserve", 0.8), ("gllm-epd", 1.0), ("gllm", 2.0)):
            for rate in (1.0, 2.0):
                results.write(tmp_path, result(system, rate, ttft * rate + 0.01 * seed, seed))
    rows = measured.draw(tmp_path)
    assert [(row.kind, row.holds) for row in rows] == [("measured", True)] * 2
    assert rows[0].ours.startswith("-20 %")
    assert (tmp_path / "measured.png").exists()
    assert len(json.loads((tmp_path / "measured.json").read_text())["numbers"]) == 18


def test_what_could_be_noise_does_not_hold(tmp_path):
    for seed, ttft in enumerate((0.7, 1.3, 0.9)):
        results.write(tmp_path, result("rserve", 1.0, ttft, seed))
        results.write(tmp_path, result("gllm-epd", 1.0, 1.0, seed))
    (row,) = measured.draw(tmp_path)
    assert row.holds is False
    assert "within the noise" in row.note
    assert "3 pairs of runs" in row.note


def test_table_1_compares_answers(tmp_path):
    assert table1.draw(tmp_path)[0].holds is None
    for system, digest in (("gllm", "x"), ("rserve", "x"), ("gllm-epd", "y")):
        config = {"figure": "table1", "system": system, "dataset": "demo"}
        body = {"questions": 10, "correct": 9, "answers_digest": digest}
        made = Result(kind="measured", name=system, config=config, seed=0, commit="c", machine="m", body=body)
        results.write(tmp_path, made)
    assert table1.draw(tmp_path)[0].holds is False


def test_idle_shares_of_a_timeline():
    def span(worker: str, start: float, end: float) -> dict:
        times = {"start": start, "end": end, "args": {"batch": 0, "chunks": [[0, 0, 1]]}}
        return {"e": "span", "worker": worker, "kind": "prefill", "name": "prefill 1 tokens"} | times

    stages = [span("stage 1", 1, 2), span("stage 0", 0, 1), span("stage 1", 3, 4)]
    log = [*stages, {"e": "next_batch"}, span("encoder 0", 0, 0.5)]
    assert timeline.idle_shares(log) == {"stage 0": 0.75, "stage 1": 0.5, "encoder 0": 0.875}
    assert timeline.bubbles(log)["stage 1"] == pytest.approx(1 / 3)
    assert list(timeline.spans(log)) == ["encoder 0", "stage 0", "stage 1"]


def test_the_encoders_share_grows_with_the_resolution_up_to_the_pixel_limit(tmp_path):
    run_all(tmp_path, fig02.points(), workers=1)
    shares = [fig02.parts(tmp_path, "PP4", name, True)["share"] for name in ("1K", "2K", "4K", "8K")]
    assert shares == sorted(shares)
    assert fig02.draw(tmp_path)[0].holds


def test_packing_removes_bubbles(tmp_path):
    run_all(tmp_path, fig10.points(), workers=1)
    assert fig10.draw(tmp_path)[0].holds


def test_logs_of_the_real_system_are_drawn_beside_the_simulated_ones(tmp_path):
    """Both come in one format: here a simulated log stands where the real one would."""
    run_all(tmp_path, fig10.points(), workers=1)
    claim = fig10.draw(tmp_path)[1]
    assert (claim.kind, claim.holds) == ("measured", None)
    for point in fig10.points():
        name = f"timeline-10-{point.deployment.scheme}"
        config = {"figure": "timeline-10", "case": point.deployment.scheme, "workload": "w", "devices": "3 on 2 cores"}
        made = Result(kind="measured", name=name, config=config, seed=0, commit="c", machine="m",
                      body=need(tmp_path, point))  # fmt: skip
        path = results.write(tmp_path, made)
        lines = [eventlog.dump(record) + "\n" for record in event_log(tmp_path, point)]
        path.with_suffix(".events.jsonl").write_text("".join(lines))
    simulated, claim = fig10.draw(tmp_path)
    assert (claim.kind, claim.ours, claim.devices) == ("measured", simulated.ours, "3 on 2 cores")
    assert (tmp_path / "fig10-measured.png").exists()


def test_area_under_a_curve_and_what_counts_as_near():
    assert fig14.area([0.0, 1.0, 3.0], [1.0, 1.0, 0.0]) == 2.0
    assert near(0.13, 0.16)
    assert near(0.10, 0.08)
    assert not near(1.54, 3.77)


def test_the_printed_table_says_no_and_why():
    row = Row(figure="9", claim="c", paper="1", ours="2", holds=False, devices="4", note="because")
    assert table([row]).splitlines()[1].split()[-3:] == ["NO", "simulated", "4"]
    assert "because" in table([row])


def test_the_sensitivity_covers_the_unknowns():
    assert {s.budget for s in budget.SETTINGS} == {512, 1024, 2048, 4096}
    assert {s.workload for s in budget.SETTINGS} == {"1K", "1K-interleaved"}
    assert any(s.preprocess_s for s in budget.SETTINGS)


def test_fidelity_reads_predictions(tmp_path):
    assert fidelity.draw(tmp_path)[0].holds is None
    (tmp_path / "real-fidelity.json").write_text('{"predictions": []}')
    with pytest.raises(MissingResult, match="older version"):
        fidelity.draw(tmp_path)
    predictions = [
        {
            "system": name,
            "rate": 1.0,
            "predicted": predicted,
            "measured": 1.0,
            "error": predicted - 1.0,
            "requests": [[predicted, 1.0]],
        }
        for name, predicted in (("gllm", 1.1), ("rserve", 0.7))
    ]
    found = {"machine": "a test", "goal": 0.15, "scatter": "2, too few", "predictions": predictions}
    (tmp_path / "real-fidelity.json").write_text(json.dumps(found))
    (row,) = fidelity.draw(tmp_path)
    assert row.note.endswith("single requests: 2, too few")
    assert (row.ours, row.holds, row.kind) == ("1 of 2, largest error -30 %", False, "simulated against measured")
    assert (tmp_path / "fidelity.png").exists()
