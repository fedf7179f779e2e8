"""The simulator imports the two cores, their configs and the standard library; nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SIM = Path(__file__).parents[2] / "benchmarks" / "sim"
ALLOWED = ("benchmarks.sim", "gllm.core", "rserve.core", "rserve.config", "gllm.config")

PROBE = """
import json, pkgutil, importlib, sys
import benchmarks.sim
for module in pkgutil.iter_modules(benchmarks.sim.__path__):
    importlib.import_module("benchmarks.sim." + module.name)
print(json.dumps(sorted(sys.modules)))
"""


def test_the_simulator_imports_the_cores_and_the_standard_library():
    answer = subprocess.run(
        [sys.executable, "-S", "-c", PROBE], cwd=SIM.parents[1], capture_output=True, text=True, check=True
    )
    ours = ("benchmarks", "gllm", "rserve")
    loaded = json.loads(answer.stdout)
    foreign = [name for name in loaded if name.partition(".")[0] not in (*sys.stdlib_module_names, *ours)]
    assert foreign == ["__main__"]
    beyond = [
        name for name in loaded if "." in name and name.partition(".")[0] in ours and not name.startswith(ALLOWED)
    ]
    assert beyond == []
