"""The whole check on one GPU in under 8 minutes: a JSON line for each check, and a summary; exit status 1 if one fails.

    bash benchmarks/gpu_check.sh                    # on a GPU; without one, the same checks at toy sizes on the CPU
    bash benchmarks/gpu_check.sh --only tokens flops

Needs torch, transformers, numpy, safetensors and pillow, triton and flash-attn for their backends, pyzmq and msgspec
for the schemes; what is missing is named and its checks are skipped. No network. Every check runs in a process of its
own: one that crashes the device takes no other with it. As yet only the dry run has run: no GPU was at hand.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
BUDGET = 465.0  # seconds for all checks
LEAST = 20.0  # seconds that a check should have left to be worth a start

# module -> what to install
PACKAGES = {
    "torch": "torch", "numpy": "numpy", "transformers": "transformers", "safetensors": "safetensors", "PIL": "pillow",
    "tokenizers": "tokenizers", "jinja2": "jinja2", "zmq": "pyzmq", "msgspec": "msgspec", "httpx": "httpx",
    "triton": "triton", "flash_attn": "flash-attn",
}  # fmt: skip
MODEL = ("torch", "numpy", "safetensors")
ENGINE = (*MODEL, "transformers", "tokenizers", "jinja2", "PIL", "zmq", "msgspec", "httpx")


@dataclass(frozen=True, slots=True)
class Check:
    """run: "module:function", and its first arguments. limit: seconds, after which it is ended and has failed."""

    run: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...]
    limit: float


CHECKS = {
    "conformance-sdpa": Check("benchmarks.real.gpu_correct:conformance", ("sdpa",), ("torch", "numpy"), 60),
    "conformance-triton": Check(
        "benchmarks.real.gpu_correct:conformance", ("triton",), ("torch", "numpy", "triton"), 150
    ),
    "conformance-flash": Check(
        "benchmarks.real.gpu_correct:conformance", ("flash",), ("torch", "numpy", "flash_attn"), 60
    ),
    "tokens": Check("benchmarks.real.gpu_correct:tokens", (), (*MODEL, "transformers", "PIL"), 90),
    "flops": Check("benchmarks.real.gpu_speed:flops", (), MODEL, 90),
    "attention": Check("benchmarks.real.gpu_speed:attention", (), MODEL, 60),
    **{
        f"scheme-{name}": Check("benchmarks.real.gpu_speed:scheme", (name,), ENGINE, 100)
        for name in ("gllm", "gllm-epd", "rserve-intra", "rserve")
    },
}


def missing(modules: tuple[str, ...]) -> list[str]:
    """What to install for those that are not there."""
    return [PACKAGES[module] for module in modules if find_spec(module) is None]


def machine() -> dict[str, Any]:
    """What this is; with the names of packages that are not there."""
    facts: dict[str, Any] = {"python": platform.python_version(), "missing": missing(tuple(PACKAGES))}
    code = (
        "import json, torch; c = torch.cuda.is_available(); print(json.dumps({'torch': torch.__version__, "
        "'cuda': torch.version.cuda, 'gpu': torch.cuda.get_device_name() if c else None}))"
    )
    if find_spec("torch"):  # in a process of its own: this one must not hold the device
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        facts |= json.loads(out.stdout) if out.returncode == 0 else {"torch": out.stderr.strip()[-200:]}
    return facts


def run_check(name: str, tiny: bool, left: float) -> dict[str, Any]:
    """The check's JSON line."""
    check = CHECKS[name]
    if absent := missing(check.needs):
        return {"check": name, "status": "skip", "reason": f"not installed: {', '.join(absent)}"}
    if left < LEAST:
        return {"check": name, "status": "skip", "reason": f"{left:.0f} of the {BUDGET:.0f} seconds are left"}
    limit = min(check.limit, left)
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if tiny and name == "conformance-triton" else {})
    command = [sys.executable, "-m", "benchmarks.real.gpu_check", "--run", name, *(["--dry-run"] if tiny else [])]
    begin = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return {"check": name, "status": "fail", "reason": f"not done after {limit:.0f} seconds", "tail": err[-500:]}
    result = {"check": name, "status": "fail", "seconds": round(time.monotonic() - begin, 1)}
    try:
        return result | json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        return result | {"reason": f"ended with status {process.returncode}", "tail": (err or out)[-1000:]}


def perform(name: str, tiny: bool) -> dict[str, Any]:
    """Run one check in this process."""
    import torch

    from benchmarks.real.gpu_correct import Failed, Unable

    if tiny:
        torch.set_num_threads(1)
    module, _, function = CHECKS[name].run.partition(":")
    work = getattr(import_module(module), function)
    try:
        return {"status": "pass"} | work(*CHECKS[name].arguments, tiny)
    except Unable as error:
        return {"status": "skip", "reason": str(error)}
    except Failed as error:
        return {"status": "fail", "reason": str(error)} | error.figures


def key_figures(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of the matrix product's FLOP/s, and each scheme's time to first token and throughput."""
    figures: dict[str, Any] = {}
    for result in results:
        shares = {name: part["share"] for name, part in result.items() if isinstance(part, dict) and "share" in part}
        figures |= {f"{name}_share": share for name, share in shares.items()}
        figures |= {
            f"{result['check']}_{name}": result[name]
            for name in ("ttft_median_s", "input_tokens_per_s")
            if name in result
        }
    return figures


def check_all(names: list[str], dry_run: bool) -> int:
    """All of them in order, each line as it comes. Returns the exit status."""
    begin = time.monotonic()
    facts = machine()
    tiny = dry_run or not facts.get("gpu")
    print(json.dumps({"check": "machine", "status": "pass", **facts}), flush=True)
    results = []
    for name in names:
        results.append(run_check(name, tiny, BUDGET - (time.monotonic() - begin)))
        print(json.dumps(results[-1]), flush=True)
    by_status = {s: [r["check"] for r in results if r["status"] == s] for s in ("pass", "fail", "skip")}
    summary = {"benchmark": "gpu_check", "kind": "measured", "dry_run": tiny, "gpu": facts.get("gpu"), **by_status}
    summary |= {"figures": key_figures(results), "seconds": round(time.monotonic() - begin, 1)}
    print(json.dumps(summary), flush=True)
    return 1 if by_status["fail"] else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU, also where a GPU is")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), metavar="CHECK")
    parser.add_argument("--run", choices=list(CHECKS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(perform(args.run, args.dry_run)))
        return
    raise SystemExit(check_all(args.only, args.dry_run))


if __name__ == "__main__":
    main()
