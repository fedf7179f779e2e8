"""Event logs of the real system for the figures."""

from __future__ import annotations

import pytest

from benchmarks.figures import fig05, fig07, fig10, timeline
from benchmarks.real.servers import ServerFailed, Setting
from benchmarks.real.timelines import SCENES, Scene, show, since_request
from benchmarks.sim.images import Image
from gllm.config import DEMO_CHECKPOINT, usable_cores
from gllm.core.timeline import trace

SETTING = Setting(checkpoint=DEMO_CHECKPOINT, cores=tuple(usable_cores()[:2]))
SMALL = Scene(figure="7", case="rserve", system="rserve", parts=(8, Image(112, 112), 8, Image(112, 84)),
              num_requests=2, token_budget=64)  # fmt: skip


def test_scenes_are_what_the_figures_ask_for():
    for module, cases in ((fig05, fig05.MEASURED), (fig07, fig07.MEASURED), (fig10, fig10.SCHEMES)):
        assert tuple(scene.case for scene in SCENES if scene.figure == module.NUMBER) == cases
    vanilla, cpp = (scene for scene in SCENES if scene.figure == "5")
    assert vanilla.flags == ("--pp", "2", "--no-chunked-pipeline")
    assert cpp.flags == ("--pp", "2")


def test_a_scene_is_logged_without_its_warm_up(tmp_path):
    result, log = show(SMALL, SETTING, tmp_path)
    assert result.config["devices"] == f"2 workers on {len(SETTING.cores)} cores"
    assert result.body["summary"]["requests"] == 2
    asked = [record["in"][0]["request_id"] for record in log if record["e"] == "on_request"]
    assert len(asked) == 2
    workers = timeline.spans(log)
    assert set(workers) == {"encoder 0", "stage 0"}
    shown = {ref[0] for span in workers["encoder 0"] for ref in span["args"]["items"]}
    assert shown == set(asked)
    tokens = sum(n for span in workers["stage 0"] for _, _, n in span["args"]["chunks"])
    assert tokens == sum(len(r["in"][0]["token_ids"]) for r in log if r["e"] == "on_request")
    assert all(0 <= share < 1 for share in timeline.idle_shares(log).values())
    assert len(trace(log)["traceEvents"]) > len(log) / 10


def test_a_scene_that_cannot_be_served_says_why(tmp_path):
    scene = Scene(figure="7", case="x", system="gllm", parts=(8, *[Image(112, 112)] * 9), num_requests=1,
                  token_budget=64)  # fmt: skip
    with pytest.raises(ServerFailed, match="400"):
        show(scene, SETTING, tmp_path)


def test_spans_of_before_are_left_out():
    log = [
        {"t": 1.0, "e": "on_request"},
        {"e": "span", "start": 1.1, "end": 1.2},
        {"t": 2.0, "e": "on_request"},
        {"e": "span", "start": 1.9, "end": 2.1},
        {"e": "span", "start": 2.1, "end": 2.2},
    ]
    assert since_request(log, 1) == [log[2], log[4]]
