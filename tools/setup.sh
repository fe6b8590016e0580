#!/usr/bin/env bash
# Makes .venv at the top of the checkout and installs this project there; with the argument `dev` what its tests need,
# too: DALI, Lightning and others, 1 GB.
# TORCH_INDEX_URL: where torch comes from in place of pip's own index, such as
# https://download.pytorch.org/whl/cu126 for drivers older than 580; remembered, so it need be given only once.
# Does nothing when that is done and neither pyproject.toml, setup.py, tools/constraints.txt nor the decoder in C has
# changed since.
# A .venv that somebody else made is installed into, and nothing of it is deleted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=${1:-}
stamp=.venv/installed # "PLACE: STATE [dev]"; the place, because a virtual environment breaks when moved or copied
index=.venv/torch-index # of torch, where it is not pip's own
state=$(cat pyproject.toml setup.py tools/constraints.txt datapipe/native/*.[ch] | cksum)
was=
if [[ -e $stamp ]]; then
    was=$(<"$stamp")
fi
torch_from=
if [[ -e $index ]]; then
    torch_from=$(<"$index")
fi

works() {
    .venv/bin/python -c '' 2>/dev/null
}

# The first Python that is new enough and can make a virtual environment. Each is tried by running it:
# a name on PATH may be a shim with nothing behind it.
find_python() {
    local name found
    for name in python3 python3.13 python3.12 python3.11; do
        found=$("$name" -c 'import sys; print(sys.version_info >= (3, 11))' 2>/dev/null) || continue
        if [[ $found != True ]]; then
            continue
        elif "$name" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$name"
            return
        fi
        echo "setup: $name cannot make a virtual environment: its module venv or ensurepip is missing" \
            "(Debian and Ubuntu: apt install python3-venv)" >&2
    done
    echo "setup: found no usable Python 3.11 or newer (tried python3, python3.13, python3.12, python3.11)" >&2
    return 1
}

make_venv() {
    local python
    python=$(find_python)
    rm -rf .venv
    mkdir .venv
    echo "$PWD: unfinished" >"$stamp" # so that what Ctrl-C leaves is known as ours
    "$python" -m venv .venv
}

again=()
if [[ -n ${TORCH_INDEX_URL:-} && $TORCH_INDEX_URL != "$torch_from" ]]; then
    torch_from=$TORCH_INDEX_URL
    again=(--force-reinstall) # pip would keep the torch that is there
elif [[ $was == "$PWD: $state dev" || ($was == "$PWD: $state " && -z $extras) ]] && works; then
    exit 0
fi
echo "==> Setting up .venv (takes minutes the first time)"
if [[ -e .venv && -z $was ]]; then
    echo "    it is there and not made by this script: installing into it"
elif [[ $was != "$PWD: "* || $was == "$PWD: unfinished" ]] || ! works; then
    make_venv
fi
pip_install() {
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c tools/constraints.txt "$@"
}
if [[ -n $torch_from ]]; then
    pip_install ${again[@]+"${again[@]}"} --index-url "$torch_from" torch
    echo "$torch_from" >"$index"
fi
pip_install -e ".${extras:+[$extras]}"
echo "$PWD: $state $extras" >"$stamp"
