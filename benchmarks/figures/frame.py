"""What every figure has: rows of claims, its numbers beside its picture, and a command line of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from matplotlib.figure import Figure

from benchmarks import results
from benchmarks.figures.points import Point, run_all

# A number of the paper counts as met within a quarter of it, or three points of a percentage.
RELATIVE = 0.25
POINTS = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One claim against what we found. holds: None when it was not run. note: what was fitted, or why it does not
    hold, where that is known."""

    figure: str
    claim: str
    paper: str
    ours: str
    holds: bool | None
    kind: str = "simulated"
    devices: str = ""
    note: str = ""


class FigureModule(Protocol):
    """A figure's script. `points`: the simulated runs it reads; `draw`: reads results in a folder, writes the picture
    and the numbers, returns the rows."""

    NUMBER: str

    def points(self) -> list[Point]: ...
    def draw(self, folder: Path) -> list[Row]: ...


def near(ours: float, paper: float) -> bool:
    return abs(ours - paper) <= max(RELATIVE * abs(paper), POINTS if abs(paper) < 1 else 0.0)


def percent(share: float) -> str:
    return f"{100 * share:+.0f} %"


def save(folder: Path, number: str, picture: Figure | None, numbers: Any, rows: Sequence[Row]) -> None:
    """fig12.png and fig12.json in the folder."""
    stem = figure_stem(number)
    if picture is not None:
        write_picture(folder, stem, picture)
    results.write_json(
        folder / f"{stem}.json",
        {"figure": number, "commit": results.commit(), "numbers": numbers, "rows": [asdict(row) for row in rows]},
    )


def write_picture(folder: Path, stem: str, picture: Figure) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    picture.savefig(folder / f"{stem}.png", dpi=110, bbox_inches="tight", metadata={"Software": None})


def figure_stem(number: str) -> str:
    return f"fig{number}" if number.isdigit() else number


def table(rows: Iterable[Row]) -> str:
    """The rows as text, one line each, notes below."""
    heads = ("figure", "claim", "paper", "ours", "holds", "kind", "devices")
    words = {True: "yes", False: "NO", None: "not run"}
    lines, cells = [], [heads]
    rows = list(rows)
    cells += [(r.figure, r.claim, r.paper, r.ours, words[r.holds], r.kind, r.devices) for r in rows]
    widths = [max(len(str(row[i])) for row in cells) for i in range(len(heads))]
    for number, row in enumerate(cells):
        lines.append("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if number and rows[number - 1].note:
            lines.append(f"        ^ {rows[number - 1].note}")
    return "\n".join(lines)


def main(module: FigureModule, argv: Sequence[str] | None = None) -> int:
    """Run what the figure needs, draw it and print its rows."""
    parser = argparse.ArgumentParser(description=f"figure {module.NUMBER}")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="folder of result files")
    args = parser.parse_args(argv)
    run_all(args.results, module.points())
    print(table(module.draw(args.results)))
    print(f"{args.results / figure_stem(module.NUMBER)}.png", file=sys.stderr)
    return 0
