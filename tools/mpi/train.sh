#!/usr/bin/env bash
# Trains imagenet-resnet50 on 2 nodes with 4 GPUs each. Written by `trainer launch`, to be read and edited. To run it by Open
# MPI's mpirun, with one line per host in the file `hosts`, such as `node1 slots=4`:
#
#     bash /shared/runs/imagenet/launch.sh --hostfile hosts
#
# What is given to it goes to mpirun. Run again, after whatever stopped it, it finds the copies, and continues the
# run. The exit code is 0 when the target is reached (or none is set), 1 when it is missed or something failed, 75 when
# the time was over.

set -euo pipefail
begun=$(date +%s)
# What is left of the time; after long staging enough for a single step, after which the training stops, to be continued.
left() {
    local seconds=$((14400 - $(date +%s) + begun))
    echo "0:$((seconds > 31 ? seconds : 31))"
}
# Open MPI (4; 5) would bind each process to a core or a few, and each has many threads.
export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none
# The processes meet at the first host. Programs by their paths, as the other hosts' PATH may not have them. MPICH's mpiexec
# takes -ppn N in place of --map-by ppr:N:node, and no -x: it hands over all variables.
first=$(mpirun "$@" -n 1 hostname)
export MASTER_ADDR=$first MASTER_PORT=$((20000 + $$ % 10000))

mpirun "$@" -n 2 --map-by ppr:1:node -x MASTER_ADDR -x MASTER_PORT \
    "$(command -v datapipe)" stage /shared/packed/imagenet /local/imagenet
mpirun "$@" -n 8 --map-by ppr:4:node -x MASTER_ADDR -x MASTER_PORT \
    "$(command -v trainer)" train imagenet-resnet50 --data /local/imagenet --out /shared/runs/imagenet --resume \
    --max-time "$(left)"
