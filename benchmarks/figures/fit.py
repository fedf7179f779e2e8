"""Fits the two efficiencies to the paper and writes benchmarks/sim/fitted.json; everything else is a prediction.

python -m benchmarks.figures.fit
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks import results
from benchmarks.figures.points import Point, simulate
from benchmarks.sim.cost import Efficiency
from benchmarks.sim.fitted import FILE
from benchmarks.systems import deploy

PLATEAU = 10_600.0  # tokens/s, RServe at 1K, figure 13
SHARE = 0.11  # encoder's share of TTFT at 1K, figure 2

SATURATED = Point(deployment=deploy("rserve", "PP4"), workload="1K", rate=None, num_requests=120)
ALONE = Point(deployment=deploy("gllm", "PP4"), workload="1K", rate=None, num_requests=1)


def plateau(efficiency: Efficiency) -> float:
    throughput: float = simulate(SATURATED, efficiency)["summary"]["input_tokens_per_s"]
    return throughput


def share(efficiency: Efficiency) -> float:
    """Encoder's share of the TTFT of one request on an empty system, encoder co-located in stage 0."""
    body = simulate(ALONE, efficiency)
    encode: float = body["busy"]["stage 0"]["encode"]
    ttft: float = body["summary"]["ttft_mean"]
    return encode / ttft


def bisect(wanted: float, function: Callable[[float], float], low: float, high: float) -> float:
    """The argument at which a rising function takes the wanted value, to four digits."""
    while high - low > 1e-5:
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return round((low + high) / 2, 4)


def _plateau_at(llm: float, vision: float) -> float:
    return plateau(Efficiency(llm, vision))


def _minus_share_at(vision: float, llm: float) -> float:
    return -share(Efficiency(llm, vision))


def fit(rounds: int = 3) -> Efficiency:
    """Each target depends a little on the other number, so they are fitted in turn."""
    efficiency = Efficiency(0.4, 0.3)
    for _ in range(rounds):
        llm = bisect(PLATEAU, partial(_plateau_at, vision=efficiency.vision), 0.05, 1.0)
        vision = bisect(-SHARE, partial(_minus_share_at, llm=llm), 0.01, 1.0)
        efficiency = Efficiency(llm, vision)
    return efficiency


def main() -> None:
    efficiency = fit()
    entries = {
        "llm_efficiency": {
            "value": efficiency.llm,
            "meaning": "share of the datasheet's FLOP/s that large products of the LLM reach",
            "figure": "13",
            "target": f"RServe's plateau of {PLATEAU:.0f} tokens/s at 1K, 72B, PP4+E1, H100",
        },
        "vision_efficiency": {
            "value": efficiency.vision,
            "meaning": "the same for the ViT",
            "figure": "2",
            "target": f"encoder share of {SHARE:.0%} of the TTFT of one request at 1K, 72B, PP4, H100 (the low end)",
        },
    }
    results.write_json(FILE, entries)
    print(efficiency, f"plateau {plateau(efficiency):.0f} tokens/s, share {share(efficiency):.3f}")


if __name__ == "__main__":
    main()
