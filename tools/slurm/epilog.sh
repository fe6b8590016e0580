#!/usr/bin/env bash
# Tidies the folder that prolog.sh has made: the job that has ended keeps its copies no more; those of earlier versions go;
# and if the disk has too little room, the user's copies that no other job needs go, the longest unused first. What there
# is room for stays, for the next job. For administrators: copy it, edit what is marked, and name it in slurm.conf, as
#
#     Epilog=/etc/slurm/epilog.sh
#
# Slurm runs it as root, without a PATH, on each node after a job, and drains the node if it fails: it never does.
set -uo pipefail
export PATH=/opt/datapipe/bin:/usr/sbin:/usr/bin:/sbin:/bin # EDIT: first, where `datapipe` is
caches=/local/datapipe                                      # EDIT: as in prolog.sh
free=200GiB                                                 # EDIT: room that the next job should find
limit=120                                                   # EDIT: seconds that it may take

folder=$caches/$SLURM_JOB_USER
[[ -d $folder ]] || exit 0
# As the job's user: what that user may not remove, this cannot. The variable tells that the job has ended; older
# versions of Slurm do not set it.
export SLURM_SCRIPT_CONTEXT=${SLURM_SCRIPT_CONTEXT:-epilog_slurmd}
cd /
runuser -u "$SLURM_JOB_USER" -- timeout -k 10 "$limit" datapipe cache clean "$folder" --free "$free" --timeout 20 2>&1 |
    logger -t datapipe-epilog
exit 0
