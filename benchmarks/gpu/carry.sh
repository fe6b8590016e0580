#!/usr/bin/env bash
# Makes the folder that `run_all.sh` needs on a machine that reaches no index of packages:
#
#   bash benchmarks/gpu/carry.sh PYTHON_VERSION TO [PACKAGE …]
#
# On a machine with this project and its extra `dev` (`tools/test.sh` makes .venv): downloads wheels for Linux and that
# Python, such as 3.12; of the named packages and what they need, or of all that this project, its tests and DALI need,
# except torch. Beside them go the photographs, Fashion-MNIST where it can be had, and this commit as project.tar.gz. What
# has more than 55 MB is split. DALI: its package, else nvidia-dali-cuda130, or none; MACHINE: else x86_64.
set -euo pipefail
if [[ $# -lt 2 || $1 != 3.* ]]; then
    echo "usage: carry.sh PYTHON_VERSION TO [PACKAGE …]" >&2
    exit 2
fi
version=$1 to=$(realpath -m "$2")
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
machine=${MACHINE:-x86_64}
mkdir -p "$to/wheels"
rm -f "$to"/wheels/*

# Where the wheels go, torch is there: an empty wheel stands for it while pip chooses the others. It has the version that
# is here, and a label of its own, so that it is taken, also where a file of constraints names a version.
stand_in=$(mktemp -d)
trap 'rm -rf "$stand_in"' EXIT
torch=$("$python" - "$stand_in" <<'END'
import sys, zipfile
from importlib import metadata
version = metadata.version("torch").partition("+")[0] + "+elsewhere"
with zipfile.ZipFile(f"{sys.argv[1]}/torch-{version}-py3-none-any.whl", "w") as wheel:
    folder = f"torch-{version}.dist-info"
    wheel.writestr(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(f"{folder}/RECORD", "")
print(f"torch=={version}")
END
)
platforms=()
for tag in linux manylinux1 manylinux2010 manylinux2014 manylinux_2_{5,12,17,24,26,27,28,34}; do
    platforms+=(--platform "${tag}_$machine")
done
download() { # PACKAGE…
    "$python" -m pip download --quiet --disable-pip-version-check --dest "$to/wheels" --only-binary=:all: \
        --python-version "$version" --implementation cp "${platforms[@]}" --find-links "$stand_in" "$torch" "$@"
}
if [[ $# -gt 0 ]]; then
    download "$@"
else
    mapfile -t needed < <("$python" -m benchmarks.gpu.check_machine --list)
    dali=${DALI:-nvidia-dali-cuda130}
    # In one call, so that pip chooses one version of what both need.
    if [[ $dali == none ]] || ! download "${needed[@]}" "$dali"; then
        [[ $dali == none ]] || echo "carry.sh: continuing without $dali" >&2
        rm -f "$to"/wheels/*
        download "${needed[@]}"
    fi
    "$python" -m benchmarks.corpus originals
    cp -rT benchmarks/work/originals "$to/originals"
    "$python" -m datapipe fetch fashion-mnist "$to/fashion-mnist" || echo "carry.sh: continuing without Fashion-MNIST" >&2
    commit=$(git rev-parse HEAD)
    echo "$commit" >"$to/COMMIT"
    git archive --format=tar.gz --add-virtual-file="COMMIT:$commit" --output "$to/project.tar.gz" HEAD
fi
rm -f "$to"/wheels/torch-*+elsewhere-*
(cd "$to/wheels" && sha256sum -- *.whl) >"$to/SHA256SUMS"
find "$to/wheels" -name '*.whl' -size +55000k -print0 | while IFS= read -r -d '' wheel; do
    split --bytes=55M "$wheel" "$wheel.part-" && rm "$wheel"
done
du -sh "$to"
cat <<END
There: unpack project.tar.gz, put this folder in it as carried/, and run until the exit code is not 75:
  bash benchmarks/gpu/run_all.sh OUT
END
