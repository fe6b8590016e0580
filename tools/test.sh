#!/usr/bin/env bash
# Lints, checks types and tests, in an environment of its own making. Arguments go to pytest, which runs at the top of
# the checkout:
#   bash tools/test.sh                             the default tests: minutes
#   bash tools/test.sh --slow                      all tests, as CI does
#   bash tools/test.sh tests/datapipe/sampling     some tests, at once: tools/lint.sh is a step of its own then
# Files of tests run side by side, two more than processors, as many wait for something; those of given paths do not,
# because it takes longer to start: `-n 3` for three at a time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"                # tests run the commands `datapipe` and `trainer`
export PYTHONPYCACHEPREFIX="$PWD/.venv/bytecode" # where each file, tests included, is compiled once for all processes
unset PYTHONDONTWRITEBYTECODE

before= some=
for word in "$@"; do
    case $before in
    -c | -k | -m | -n | -o | -p | --deselect | --ignore) ;; # the word is its value
    *)
        if [[ $word == tests/* && ! -e ${word%%::*} ]]; then
            echo "tools/test.sh: ${word%%::*} is not there; paths begin at the top of the checkout" >&2
            exit 2
        elif [[ $word == tests/* ]]; then
            some=yes
        fi
        ;;
    esac
    before=$word
done
if [[ $some ]]; then
    bash tools/setup.sh dev
    exec python -m pytest "$@"
fi
bash tools/lint.sh
exec python -m pytest -n $(($(nproc) + 2)) --maxprocesses 6 --dist loadfile "$@"
