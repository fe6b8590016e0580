#!/usr/bin/env bash
# Builds the documentation into docs/_build: `bash tools/docs.sh`, then open docs/_build/index.html. A warning, which a
# broken link between pages is too, is an error. Nothing is asked of other sites. Arguments go to sphinx-build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash tools/setup.sh dev
.venv/bin/python -m sphinx -b html -W --keep-going -n -q docs docs/_build "$@"
echo "The site is in $PWD/docs/_build/index.html"
