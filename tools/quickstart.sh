#!/usr/bin/env bash
# From nothing to a trained network and its report: `bash tools/quickstart.sh [FOLDER]`.
#
# Works in FOLDER, else in $QUICKSTART_DIR, else in quickstart/ at the top of the checkout. Run again, it
# continues with what is there; an interrupted training resumes. Ends with the training's exit code.
set -euo pipefail

if [[ $# -gt 1 || ${1:-} == -* ]]; then
    echo "usage: bash tools/quickstart.sh [FOLDER]" >&2
    [[ ${1:-} == --help || ${1:-} == -h ]] && exit 0
    exit 2
fi
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=${1:-${QUICKSTART_DIR:-$top/quickstart}}

say() {
    printf '==> %s\n' "$*"
}

bash "$top/tools/setup.sh"
export PATH="$top/.venv/bin:$PATH"
mkdir -p "$work"

raw=$work/raw
settings=()
say "Fetching Fashion-MNIST into $raw"
# apt on a new machine or in a new container does not know its mirrors' packages yet, and only root can change that.
if [[ ! -e $raw && -z ${DATAPIPE_MIRROR:-} && $(id -u) == 0 ]] && command -v apt-get >/dev/null &&
    ! apt-cache show dataset-fashion-mnist >/dev/null 2>&1; then
    say "Renewing apt's lists, which do not have Debian's package dataset-fashion-mnist"
    timeout 600 apt-get -qq -o Acquire::http::Timeout=30 update || say "They cannot be renewed: continuing without"
fi
fetched=0
datapipe fetch fashion-mnist "$raw" || fetched=$?
if [[ $fetched == 1 ]]; then
    say "Fashion-MNIST could not be fetched (no network? the reason is above)"
    say "Using the tests' small sample of it instead, with a lower target"
    raw=$top/tests/data/fashion-mnist-sample
    work=$work/sample # apart, so that nothing of it is taken for the whole data set once that can be had
    # 2,400 images instead of 60,000: the recipe's epochs would be too few steps.
    settings=(--set train.target_accuracy=0.70 --set train.epochs=12)
elif [[ $fetched != 0 ]]; then # interrupted, or our own mistake
    exit "$fetched"
fi

if [[ -e $work/packed/train/manifest.json && -e $work/packed/val/manifest.json ]]; then
    say "Packed already: $work/packed"
else
    say "Packing into $work/packed"
    datapipe pack "$raw" "$work/packed" --format tar --overwrite # what an interrupted run left, if anything
fi
say "Verifying $work/packed"
datapipe verify --deep "$work/packed"
say "Staging to $work/local"
datapipe stage "$work/packed" "$work/local"

if [[ -e $work/run ]]; then
    say "Continuing the training in $work/run"
    settings+=(--resume)
else
    say "Training in $work/run"
fi
status=0
trainer train fashion-mnist-resnet8 --data "$work/local" --out "$work/run" \
    ${settings[@]+"${settings[@]}"} || status=$?
if [[ $status == 2 && -e $work/run ]]; then
    say "If the recipe or the data have changed since, remove the run (rm -r '$work/run'), and run this again"
fi
exit $status
