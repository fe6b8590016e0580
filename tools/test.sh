#!/usr/bin/env bash
# Lints, checks types and tests, in an environment of its own making. Arguments go to pytest, which runs at the top of
# the checkout: `bash tools/test.sh --slow` runs everything, `bash tools/test.sh -m "not ranks"` a quicker part,
# `bash tools/test.sh tests/datapipe/test_fetch.py` one file. Files of tests run side by side, one more than
# processors, as many wait for something: -n 0 for one at a time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH" # tests run the commands `datapipe` and `trainer`
python -m ruff check .
python -m ruff format --check .
python -m mypy
exec python -m pytest -n $(($(nproc) + 1)) --maxprocesses 4 --dist loadfile "$@"
