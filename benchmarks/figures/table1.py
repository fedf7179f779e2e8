"""Table 1: the same quality in every scheme. Reads measured results only: questions answered by each scheme.

A result file has config {"figure": "table1", "system", "dataset"} and body {"questions", "correct", "answers_digest"}.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import results
from benchmarks.figures.frame import Row, main, save
from benchmarks.figures.points import Point

NUMBER = "table1"


def points() -> list[Point]:
    return []


def draw(folder: Path) -> list[Row]:
    found = [r for r in results.measured(folder) if r.config.get("figure") == NUMBER]
    rows = []
    for dataset in sorted({r.config["dataset"] for r in found}):
        here = [r for r in found if r.config["dataset"] == dataset]
        scores = {r.config["system"]: 100 * r.body["correct"] / r.body["questions"] for r in here}
        same = len({r.body["answers_digest"] for r in here}) == 1
        text = " / ".join(f"{name} {score:.1f}" for name, score in scores.items())
        rows.append(
            Row(figure=NUMBER, claim=f"{dataset}: all schemes give the same answers", paper="62.7 / 62.6 / 62.4 / 62.6",
                ours=text, holds=same and len(here) > 1, kind="measured", devices="1 / 2")
        )  # fmt: skip
    if not rows:
        rows.append(
            Row(figure=NUMBER, claim="all schemes give the same answers", paper="62.7 / 62.6 / 62.4 / 62.6", ours="-",
                holds=None, kind="measured", note="no measured results: run without --sim-only")
        )  # fmt: skip
    save(folder, NUMBER, None, [r.body | r.config for r in found], rows)
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.modules[__name__]))
