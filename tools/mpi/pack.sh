#!/usr/bin/env bash
# Packs a data set with mpirun, where no scheduler starts the tasks. From where `datapipe` runs (its environment
# activated):
#
#     bash tools/mpi/pack.sh -n 16 --hostfile hosts -- SOURCE OUT [options of datapipe pack]
#
# What stands before `--` goes to mpirun (or to what MPIRUN names, mpiexec say): one task a host is best, so in `hosts`
# each has `slots=1`. Python needs no MPI library. OUT must be on a filesystem that all hosts
# share.
#
# Run again with the same arguments, after whatever stopped it, it continues with the shards that are missing; when all
# are there, it says so. The exit code is 0 when everything is packed, 1 for the data, 2 for wrong options, and
# mpirun's own where that failed.
set -euo pipefail
launch=()
while [[ $# -gt 0 && $1 != -- ]]; do
    launch+=("$1")
    shift
done
if [[ $# -lt 3 ]]; then
    echo "usage: pack.sh [options of mpirun] -- SOURCE OUT [options of datapipe pack]" >&2
    exit 2
fi
shift
if ! command -v datapipe >/dev/null; then
    echo "pack.sh: no datapipe on PATH: activate its environment" >&2
    exit 127
fi

# Open MPI (4; 5) would bind each task to a core or a few, and a task has many threads.
export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none

# mpirun ends all tasks when one fails. None shall: the others' work is good. So each says that it is well, and the
# last line finds out. The command goes by its path, as the other hosts' PATH may not have it.
# shellcheck disable=SC2016
"${MPIRUN:-mpirun}" ${launch[@]+"${launch[@]}"} sh -c '"$@" || echo "this task ended with $?" >&2' - \
    "$(command -v datapipe)" pack "$@" --resume

# Also what to call by hand when mpirun was killed and all tasks were done. Shards missing: run this script again.
exec datapipe pack "$@" --finish
