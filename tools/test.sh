#!/usr/bin/env bash
# Lints, checks types and tests, in an environment of its own making. Arguments go to pytest, which runs at the top of
# the checkout:
#   bash tools/test.sh                             the default tests: minutes
#   bash tools/test.sh --slow                      all tests, as CI does
#   bash tools/test.sh tests/datapipe/sampling     some tests, at once: tools/lint.sh is a step of its own then
# Files of tests run side by side, one more than processors, as many wait for something; those of given paths do not,
# because it takes longer to start: `-n 3` for three at a time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"                # tests run the commands `datapipe` and `trainer`
export PYTHONPYCACHEPREFIX="$PWD/.venv/bytecode" # where each file, tests included, is compiled once for all processes
unset PYTHONDONTWRITEBYTECODE
for word in "$@"; do
    if [[ -e ${word%%::*} ]]; then
        bash tools/setup.sh dev
        exec python -m pytest "$@"
    fi
done
bash tools/lint.sh
exec python -m pytest -n $(($(nproc) + 1)) --maxprocesses 4 --dist loadfile "$@"
