"""The schemes that are compared: their names, how a figure shows them, and their deployments. Data only; simulated and
measured runs use the same names."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.sim.catalog import UnknownName
from benchmarks.sim.deployment import SEPARATE, Deployment


@dataclass(frozen=True, slots=True)
class System:
    """label and colour in figures; flags: what the api_server is started with (empty for vLLM: another program)."""

    label: str
    color: str
    marker: str
    flags: tuple[str, ...] = ()


SYSTEMS = {
    "vllm": System("vLLM", "#7f7f7f", "x"),
    "gllm": System("gLLM", "#1f77b4", "o"),
    "gllm-1core": System("gLLM on one core", "#17becf", "P"),  # measured runs: the paper gives EPD one device more
    "gllm-epd": System("gLLM-epd", "#ff7f0e", "s", ("--encoders", "1")),
    "rserve-intra": System("RServe-intra", "#9467bd", "v", ("--rserve", "--no-inter-request-batching")),
    "rserve": System("RServe", "#d62728", "D", ("--rserve",)),
    "rserve-elastic": System("RServe-elastic (ours)", "#2ca02c", "^"),
}


def system(name: str) -> System:
    """Raises UnknownName, which lists the known systems."""
    if name not in SYSTEMS:
        raise UnknownName(f"unknown system {name!r}; known: {', '.join(SYSTEMS)}")
    return SYSTEMS[name]


def deploy(name: str, layout: str = "", **settings: Any) -> Deployment:
    """A scheme on the LLM devices that `layout` names ("PP4", "TP4", "PP2xTP2", "" for one GPU). Schemes with separate
    encoders get one more device, as in the paper, unless the layout says otherwise ("PP3+E2")."""
    system(name)
    match = re.fullmatch(r"(?:PP(\d+))?x?(?:TP(\d+))?(?:\+E(\d+))?", layout)
    if match is None:
        raise ValueError(f"layout {layout!r} is not of the form PP4, TP4, PP2xTP2 or PP4+E1")
    pp, tp, encoders = (int(group) if group else None for group in match.groups())
    if encoders is None:
        encoders = 1 if name in SEPARATE else 0
    return replace(Deployment(scheme=name, pp=pp or 1, tp=tp or 1, encoders=encoders), **settings)


def label(deployment: Deployment) -> str:
    """As a legend shows it, with the number of devices."""
    devices = f"{deployment.num_devices} GPU{'s' if deployment.num_devices > 1 else ''}"
    return f"{system(deployment.scheme).label} {deployment.layout} ({devices})"
