#!/usr/bin/env bash
# Brings a packed data set to the disk of each host, and trains on all of them, where mpirun and no scheduler starts the
# processes. From where `datapipe` and `trainer` run (their environment activated):
#
#     bash tools/mpi/stage_and_train.sh -n 2 --hostfile hosts -- RECIPE DATA RUN [options of trainer train]
#
# What stands before `--` goes to mpirun (or to what MPIRUN names, mpiexec say): one process per host, so in `hosts` each
# has `slots=1`. Python needs no MPI library. DATA is the data set on the filesystem that all hosts share, RUN the run's
# folder there. Settings, from the environment:
#
#     LOCAL=/local/scratch/imagenet   the folder on each host's own disk, the same path on all hosts
#                                     (default: /tmp/USER/NAME OF DATA). It stays there, and the next run finds it.
#     RANKS_PER_NODE=4                processes per host, one per GPU (default: 1)
#     MASTER_ADDR=node1-ib            address of the first host (default: its name)
#
# Run again with the same arguments, after whatever stopped it, it finds the copies and continues the run. The exit code
# is 0 when the target is reached (or none is set), 1 when it is missed or something failed, 2 for wrong use of this script,
# and mpirun's own where that failed.
set -euo pipefail
launch=()
while [[ $# -gt 0 && $1 != -- ]]; do
    launch+=("$1")
    shift
done
if [[ $# -lt 4 ]]; then
    echo "usage: stage_and_train.sh [options of mpirun] -- RECIPE DATA RUN [options of trainer train]" >&2
    exit 2
fi
recipe=$2 data=$3 run=$4
shift 4
for command in datapipe torchrun; do
    if ! command -v "$command" >/dev/null; then
        echo "stage_and_train.sh: no $command on PATH: activate its environment" >&2
        exit 127
    fi
done
user=$(id -un 2>/dev/null) || user=$(id -u) # in a container, $USER may be unset, and the number without a name
local=${LOCAL:-/tmp/$user/$(basename "$data")}
on_each_host() { "${MPIRUN:-mpirun}" ${launch[@]+"${launch[@]}"} "$@"; }

# Open MPI (4; 5) would bind each process to a core or a few, and each has many threads.
export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none

# The hosts, by the number of the process that each has (Open MPI's; MPICH's).
# shellcheck disable=SC2016
hosts=$(on_each_host sh -c 'echo "${OMPI_COMM_WORLD_RANK:-$PMI_RANK} $(hostname)"' | sort -n | cut -d " " -f 2)
nodes=$(wc -l <<<"$hosts")
if [[ $nodes -ne $(sort -u <<<"$hosts" | wc -l) ]]; then
    echo "stage_and_train.sh: several processes on a host: give each one slot" >&2
    exit 2
fi
master=${MASTER_ADDR:-$(head -n 1 <<<"$hosts")}

# By their paths, as the other hosts' PATH may not have them. MPICH's mpiexec tells no name of the job: hence the port.
port=$((20000 + $$ % 10000))
on_each_host env MASTER_PORT="$port" "$(command -v datapipe)" stage "$data" "$local" --master "$master"
# Without this folder on Python's path, a user's own trainer.py there is not what trains.
# shellcheck disable=SC2016
on_each_host env PYTHONSAFEPATH=1 sh -c 'exec "$0" --node-rank="${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" "$@"' \
    "$(command -v torchrun)" --nnodes="$nodes" --nproc-per-node="${RANKS_PER_NODE:-1}" \
    --rdzv-id="mpi-$$" --master-addr="$master" --master-port="$port" \
    -m trainer train "$recipe" --data "$local" --out "$run" --resume "$@"
