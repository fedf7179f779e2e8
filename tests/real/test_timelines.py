"""Event logs of the real system for the figures."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.figures import fig05, fig07, fig10, timeline
from benchmarks.real.servers import ServerFailed, Setting
from benchmarks.real.timelines import SCENES, Scene, show, since_request
from benchmarks.sim.images import Image
from gllm.config import DEMO_CHECKPOINT, usable_cores
from gllm.core.timeline import trace

SETTING = Setting(checkpoint=DEMO_CHECKPOINT, cores=tuple(usable_cores()[:2]))
SMALL = (8, Image(112, 112), 8, Image(112, 84))


def test_scenes_are_what_the_figures_ask_for():
    for module, cases in ((fig05, fig05.MEASURED), (fig07, fig07.MEASURED), (fig10, fig10.SCHEMES)):
        assert tuple(scene.case for scene in SCENES if scene.figure == module.NUMBER) == cases
    vanilla, cpp = (scene for scene in SCENES if scene.figure == "5")
    assert vanilla.flags == ("--pp", "2", "--no-chunked-pipeline")
    assert cpp.flags == ("--pp", "2")


@pytest.mark.parametrize("system", ["gllm", "rserve"])
def test_a_scene_is_logged_without_its_warm_up(system, tmp_path):
    result, log = show(
        Scene(figure="7", case=system, system=system, parts=SMALL, num_requests=2, token_budget=64), SETTING, tmp_path
    )
    assert result.body["summary"]["requests"] == 2
    asked = [record["in"][0]["request_id"] for record in log if record["e"] == "on_request"]
    assert len(asked) == 2
    workers = timeline.spans(log)
    assert set(workers) == {"stage 0"} | ({"encoder 0"} if system == "rserve" else set())
    assert result.config["devices"] == f"{len(workers)} workers on {len(SETTING.cores)} cores"
    spans = [span for found in workers.values() for span in found]
    encoded = sorted(ref for span in spans if span["kind"] == "encode" for ref in span["args"]["items"])
    assert encoded == [[request_id, index] for request_id in asked for index in range(2)]
    tokens = sum(n for span in spans if span["kind"] != "encode" for _, _, n in span["args"]["chunks"])
    assert tokens == sum(len(r["in"][0]["token_ids"]) for r in log if r["e"] == "on_request")
    for found in workers.values():
        assert all(a["end"] <= b["start"] for a, b in pairwise(found)), "a worker does one thing at a time"
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
