#!/usr/bin/env bash
# Lints and checks types, as before each commit; `bash tools/lint.sh --fix` also mends what can be mended by itself.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ $# -gt 1 || ${1:---fix} != --fix ]]; then
    echo "usage: tools/lint.sh [--fix]" >&2
    exit 2
fi
bash tools/setup.sh dev
export PATH="$PWD/.venv/bin:$PATH"
if [[ $# == 1 ]]; then
    python -m ruff check --fix .
    python -m ruff format .
fi
python -m ruff check .
python -m ruff format --check .
python -m mypy
