#!/usr/bin/env bash
# Runs the benchmarks of a machine with one GPU, unattended and offline, and writes a record and a page:
#
#   bash benchmarks/gpu/run_all.sh OUT [--carried FOLDER] [--check] [--dry-run] [--only NAME …] [--limit-s 570]
#
# First it installs what was carried here into OUT (`carry.sh` makes that folder elsewhere; default: carried/ at the top of
# this project), and says what is missing and how to carry it. It stops by itself before the limit, and may be killed at any
# moment: the same command again continues. Exit code 75 says "call again", 0 that all steps are done, 1 that all are
# recorded and some failed, 2 that something is missing without which none can be done. --check only checks;
# --dry-run does all steps at tiny sizes on the processor. PYTHON: the Python that has torch, else python3.
# BENCHMARKS_WORK: where data sets are made, else benchmarks/work; 5 GB.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
carried=$root/carried limit_s=570 only_checks= words=() out=
while [[ $# -gt 0 ]]; do
    case $1 in
    --carried) carried=$(realpath -m "$2") && shift ;;
    --limit-s) limit_s=$2 && shift ;;
    --check) only_checks=yes ;;
    *) if [[ -z $out && $1 != -* ]]; then out=$(realpath -m "$1"); else words+=("$1"); fi ;;
    esac
    shift
done
if [[ -z $out ]]; then
    echo "usage: run_all.sh OUT [--carried FOLDER] [--check] [--dry-run] [--only NAME …] [--limit-s 570]" >&2
    exit 2
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "run_all.sh: $python is $("$python" -V 2>&1): this project needs Python 3.11 or newer (PYTHON=…)" >&2
    exit 2
fi
mkdir -p "$out/wheels"

# Wheels in pieces are joined once all pieces are here; those that are not yet here may come with a later call.
for first in "$carried"/wheels/*.whl.part-aa; do
    [[ -e $first ]] || continue
    wheel=$(basename "${first%.part-aa}")
    [[ -e $out/wheels/$wheel ]] && continue
    cat "${first%aa}"* >"$out/wheels/joined"
    if (cd "$out/wheels" && grep " $wheel\$" "$carried/SHA256SUMS" | sed "s/ $wheel\$/ joined/" | sha256sum --check --status); then
        mv "$out/wheels/joined" "$out/wheels/$wheel"
    else
        echo "run_all.sh: the pieces of $wheel in $carried/wheels are not all here, or damaged: continuing without it" >&2
        rm "$out/wheels/joined"
    fi
done
mapfile -t wheels < <(find "$carried/wheels" "$out/wheels" -name '*.whl' 2>/dev/null | sort)
site=$out/site
list=$(printf '%s\n' "${wheels[@]##*/}")
if [[ ${#wheels[@]} -gt 0 && $list != "$(cat "$site/installed.txt" 2>/dev/null)" ]]; then
    rm -rf "$site"
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --find-links "$carried/wheels" \
        --target "$site" "${wheels[@]}"
    echo "$list" >"$site/installed.txt"
fi

# Data and the commit, each under its name only when it is whole.
take() { # FROM TO
    if [[ -e $1 && ! -e $2 ]]; then
        mkdir -p "$(dirname "$2")"
        cp -r "$1" "$2.tmp" && mv "$2.tmp" "$2"
    fi
}
export BENCHMARKS_WORK=${BENCHMARKS_WORK:-$root/benchmarks/work}
take "$carried/originals" "$BENCHMARKS_WORK/originals"
take "$carried/fashion-mnist" "$BENCHMARKS_WORK/fashion-mnist-idx"
[[ -e $root/.git ]] || take "$carried/COMMIT" "$root/COMMIT"

export PYTHONPATH=$site:$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
cd "$root"
if ! compgen -G 'datapipe/native/_plain*.so' >/dev/null && command -v cc >/dev/null; then
    "$python" setup.py --quiet build_ext --inplace >"$out/compiling.log" 2>&1 ||
        echo "run_all.sh: the decoder in C was not compiled ($out/compiling.log): continuing without it" >&2
fi
"$python" -m benchmarks.gpu.check_machine || exit 2
[[ -z $only_checks ]] || exit 0
exec "$python" -m benchmarks.gpu.run_steps "$out" --limit-s $((limit_s - SECONDS)) ${words[@]+"${words[@]}"}
