#!/usr/bin/env bash
# Makes, on the node's own disk, a folder for the copies of the job's user, where `datapipe stage` and `cache=` put them.
# For administrators: copy it, edit what is marked, and name it in slurm.conf, as
#
#     Prolog=/etc/slurm/prolog.sh
#     PrologFlags=Alloc
#
# Slurm runs it as root, without a PATH, on each node before a job. It drains the node if this fails.
set -euo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
caches=/local/datapipe # EDIT: on the node's own disk
mode=755               # EDIT: 700 where users must not read each other's copies

# Nobody but root may write to the folder above: so nobody can put a link there in a user's name.
mkdir -p -m 755 "$caches"
if [[ -L $caches || ! -O $caches || -n $(find "$caches" -maxdepth 0 -perm /022) ]]; then
    echo "prolog.sh: $caches is not a folder that only root may write to" >&2
    exit 1
fi
folder=$caches/$SLURM_JOB_USER
mkdir -p -m "$mode" "$folder"
chown --no-dereference "$SLURM_JOB_UID:$(id -g "$SLURM_JOB_UID")" "$folder"
