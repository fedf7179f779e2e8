#!/usr/bin/env bash
# The whole check on one GPU, in under 8 minutes: see benchmarks/real/gpu_check.py. Another interpreter: PYTHON=...
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.real.gpu_check "$@"
