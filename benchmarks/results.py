"""Result files: one JSON object a run, with what it needs to be made again and whether it is simulated or measured.

    {"kind": "simulated" | "measured", "name", "config": {...}, "seed", "commit", "machine", "sources", "body": {...}}

`config` says what was run (for a measured run at least "system", "workload" and "rate"). `sources` is a digest of the
code that decided the result: a file whose digest is not current is made again. No time of day stands in a simulated
file, so that a second run gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
DECIDING = (
    "gllm/core",
    "rserve/core",
    "rserve/config.py",
    "benchmarks/sim",
    "benchmarks/workloads.py",
    "benchmarks/metrics.py",
    "benchmarks/figures/points.py",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """machine: the simulated hardware, or the machine on which a measured run ran."""

    kind: Literal["simulated", "measured"]
    name: str
    config: dict[str, Any]
    seed: int
    commit: str
    machine: str
    body: dict[str, Any]
    sources: str = ""


def write(folder: Path, result: Result) -> Path:
    """Write a result under its name; an interrupted write leaves no half file."""
    path = folder / result.kind / f"{result.name}.json"
    write_json(path, asdict(result))
    return path


def read(folder: Path, kind: str, name: str) -> Result | None:
    """The result of this name, or None when there is none."""
    path = folder / kind / f"{name}.json"
    return Result(**json.loads(path.read_text())) if path.exists() else None


def measured(folder: Path) -> Iterator[Result]:
    """All measured results, in order of their names."""
    for path in sorted((folder / "measured").glob("*.json")):
        yield Result(**json.loads(path.read_text()))


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)


@cache
def commit() -> str:
    """The commit that is checked out, or "unknown" outside a repository."""
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.stdout.strip()


@cache
def sources() -> str:
    """A digest of the files that decide simulated results."""
    digest = hashlib.sha256()
    for path in sorted(_files(DECIDING)):
        digest.update(path.relative_to(ROOT).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def this_machine() -> str:
    """Words for the machine of a measured run."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}"


def _files(names: Iterable[str]) -> Iterator[Path]:
    for name in names:
        path = ROOT / name
        if path.is_dir():
            yield from (p for p in path.rglob("*") if p.suffix in (".py", ".json"))
        else:
            yield path
