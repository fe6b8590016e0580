#!/usr/bin/env bash
# Installs the libraries that bench_pack.py and bench_loader.py compare with, into an environment of their own:
#
#   benchmarks/peers/setup.sh [FOLDER]      default: benchmarks/work/peers-venv
#
# Each by itself, tried by packing 20 images and reading them back, or by loading them. One that cannot be had is not an
# error here: FOLDER/status.tsv says why, in a line "NAME<tab>installed|missing<tab>VERSION|REASON", and what pip and the
# trial said is in FOLDER/NAME.log. Does nothing for those that are there and work. PYTHON: the Python to take, else python3.
# torchcodec gets an environment inside the other, FOLDER/torchcodec: on PyPI it is linked against torch's libraries for
# CUDA, and so needs PyPI's own torch, also on a machine without a GPU; the others take whatever torch is found.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=$(realpath -m "${1:-$root/benchmarks/work/peers-venv}")
python=$venv/bin/python # of the environment that is being set up
status=$venv/status.tsv
log=
debian_packages=(g++ libopencv-dev libturbojpeg0-dev pkg-config) # what FFCV is compiled with
ffmpeg_packages=(libavdevice59 libavfilter8)                      # what SPDL decodes with; their names are Debian 12's

in_venv() {
    "$python" "$@"
}

pip_install() {
    in_venv -m pip install --disable-pip-version-check -c "$here/constraints.txt" "$@" >>"$log" 2>&1
}

apt_install() { # PACKAGE…
    if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
        echo "error: needs $*: apt-get install them as root, or their like" >>"$log"
        return 1
    fi
    apt-get update -q >>"$log" 2>&1 || true # an old list of packages may do
    DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "$@" >>"$log" 2>&1
}

has_ffcv_libraries() {
    command -v g++ >/dev/null && pkg-config --exists opencv4 libturbojpeg 2>/dev/null
}

install_peer() {
    case $1 in
    webdataset) pip_install pillow webdataset ;;
    # torchvision is named for pip to choose the one that goes with the pinned torch.
    mosaicml-streaming) pip_install pillow torch torchvision mosaicml-streaming ;;
    litdata) pip_install pillow torch torchvision litdata ;;
    ffcv)
        # FFCV's setup.py imports numpy, and compiles against it.
        { has_ffcv_libraries || apt_install "${debian_packages[@]}"; } &&
            pip_install pillow torch numpy numba opencv-python tqdm pandas pytorch-pfn-extras setuptools wheel &&
            pip_install --no-build-isolation ffcv
        ;;
    spdl)
        pip_install pillow torch numpy spdl &&
            { ldconfig -p | grep -q libavdevice || apt_install "${ffmpeg_packages[@]}"; }
        ;;
    torchcodec)
        # Three equals signs: not 2.13.0+cpu, which two of them would allow.
        pip_install pillow numpy "torch===$(sed -n 's/^torch==//p' "$here/constraints.txt")" torchvision torchcodec
        ;;
    grain) pip_install pillow torch numpy opencv-python grain array-record ;;
    esac
}

works() { # MODULE: in benchmarks/peers; the limit is for a library that waits for a worker that has died
    (cd "$root" && timeout 300 "$python" -m benchmarks.peers.pack try "$1") >>"$log" 2>&1
}

reason() { # the last line that says error, else the last line
    { grep -iE '^(E:|[a-z.]*error)' "$log" || cat "$log"; } | tail -n 1 | tr '\t' ' '
}

report() { # NAME installed|missing DETAIL
    printf '%s\t%s\t%s\n' "$@" >>"$status.tmp"
    echo "    $1: $2${3:+, $3}"
}

make_environment() { # FOLDER: nothing, if it is there
    "$1/bin/python" -c '' 2>/dev/null || "${PYTHON:-python3}" -m venv "$1"
}

set_up() { # NAME MODULE [FOLDER]: FOLDER: of an environment of its own
    local was_there=
    log=$venv/$1.log
    : >"$log"
    python=${3:-$venv}/bin/python
    make_environment "${3:-$venv}"
    if in_venv -m pip show --quiet "$1" >/dev/null 2>&1 && works "$2"; then
        was_there=yes
    fi
    if [[ $was_there ]] || { install_peer "$1" && works "$2"; }; then
        report "$1" installed "$(in_venv -c 'import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))' "$1")"
    else
        report "$1" missing "$(reason)"
    fi
}

make_environment "$venv"
echo "==> Setting up the peers in $venv (takes minutes the first time)"
: >"$status.tmp"
set_up webdataset pack_webdataset
set_up mosaicml-streaming pack_mosaicml
set_up litdata pack_litdata
set_up ffcv pack_ffcv
set_up spdl spdl_loader
set_up torchcodec torchcodec_loader "$venv/torchcodec"
set_up grain grain_loader
mv "$status.tmp" "$status"
