"""What a measured comparison runs: systems on cores, rates, seeds, number of requests; by what the machine can do."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.real.requests import Mix
from benchmarks.results import write_json
from benchmarks.sim.deployment import SEPARATE
from benchmarks.systems import system

OURS = ("gllm", "gllm-epd", "rserve-intra", "rserve")
RATE_SHARES = (0.25, 0.4, 0.55, 0.7, 0.85)  # of what the baseline serves when it is never idle
REQUESTS = (6, 60)  # fewest and most of one run
DRAIN_SHARE = 1.35  # a run takes about so many times the span of its arrivals, with what is left to do after the last
SLO_FACTOR = 5.0  # the SLO is so many times the TTFT of a request alone on the baseline


@dataclass(frozen=True, slots=True)
class Entrant:
    """A system on cores. The schemes with an encoder of their own split the cores between encoder and LLM."""

    system: str
    cores: tuple[int, ...]
    name: str  # of its results; different for every entrant

    @property
    def devices(self) -> str:
        count = len(self.cores)
        if self.system in SEPARATE:
            encoder = max(1, count // 2)
            return f"{count - encoder} LLM + {encoder} encoder cores" if count > 1 else "1 core, shared"
        return f"{count} core{'s' if count > 1 else ''}"


def entrants(cores: Sequence[int], systems: Sequence[str], one_core: bool) -> list[Entrant]:
    """All systems on the same cores; with `one_core` the baseline on a single one, too: the paper gives the schemes
    with a separate encoder one device more. Raises UnknownName."""
    found = [Entrant(system_name, tuple(cores), system_name) for system_name in systems if system(system_name)]
    if one_core and "gllm" in systems and len(cores) > 1:
        found.append(Entrant("gllm", (cores[0],), "gllm-1core"))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """rates: requests a second, rising. count: requests of one run. slo: seconds to the first token. model_path: None
    for random weights; checkpoint: the same in words."""

    workload: str
    mix: Mix
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    count: int
    max_tokens: int
    slo: float
    token_budget: int
    checkpoint: str
    model_path: str | None
    capacity: float

    @property
    def digest(self) -> str:
        """Tells results of different plans apart."""
        return hashlib.sha256(json.dumps(self.described(), sort_keys=True).encode()).hexdigest()[:12]

    def described(self) -> dict[str, Any]:
        """As it stands in results: without where things lie on this machine, but with what runs beside the servers."""
        fields = {name: value for name, value in asdict(self).items() if name != "model_path"}
        return fields | {"beside": "event logs of ours, pace meter" if self.model_path is None else ""}

    def order(self, seed: int, rate: float, names: Sequence[str]) -> list[str]:
        """Whose turn it is first changes with every round, so that a drift of the machine meets all alike."""
        turn = (self.seeds.index(seed) * len(self.rates) + self.rates.index(rate)) % len(names)
        return [*names[turn:], *names[:turn]]

    def save(self, folder: Path) -> None:
        write_json(folder / "real-plan.json", asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Plan | None:
        path = folder / "real-plan.json"
        if not path.exists():
            return None
        fields: dict[str, Any] = json.loads(path.read_text())
        mix = {name: tuple(value) for name, value in fields.pop("mix").items()}
        lists = {name: tuple(fields.pop(name)) for name in ("rates", "seeds")}
        return cls(mix=Mix(**mix), **lists, **fields)


def choose_rates(capacity: float) -> tuple[float, ...]:
    """Rates below `capacity` (requests a second), to two digits."""
    return tuple(float(f"{share * capacity:.2g}") for share in RATE_SHARES)


def choose_count(seconds: float, rates: Sequence[float], num_seeds: int, num_entrants: int) -> int:
    """Requests of one run, so that all runs together take about `seconds`."""
    per_request = DRAIN_SHARE * num_seeds * num_entrants * sum(1 / rate for rate in rates)
    low, high = REQUESTS
    return max(low, min(high, int(seconds / per_request)))
