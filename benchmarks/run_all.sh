#!/usr/bin/env bash
# Every figure of the paper and the table of its claims.
#   bash benchmarks/run_all.sh [--sim-only] [--full] [--figure N] [--vllm-python PYTHON] [--model-path DIR]
# Pictures, numbers and summary.json go to benchmarks/results/ (--results DIR: elsewhere). PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" -m benchmarks.figures.run "$@"
