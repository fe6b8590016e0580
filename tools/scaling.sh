#!/usr/bin/env bash
# Measures how a training scales: each number of ranks several times, with seeds of their own, in turns, so that a slow hour
# slows all alike. From where `trainer` runs (its environment activated):
#
#     bash tools/scaling.sh RECIPE --data DIR --out DIR [--ranks "1 2 4 8"] [--times 3] [--weak N] [--slurm] [options of trainer repeat]
#
# With --weak N each rank has a batch of N images, so that the global batch grows with the ranks (weak scaling), and the
# learning rate by the recipe's rule (optimizer.lr_scaling); the table says both. Without, all have the recipe's batch.
#
# Runs go to DIR/ranks-N/seed-K; the table to DIR/scaling.txt, .csv and .json, the plot to scaling.png and .pdf. Run again,
# it continues, and redoes nothing that has finished. A number of ranks that fails is in the table. With --slurm, from a
# login node, there is a job for each number of ranks, and another for the table after them; options of sbatch, such as
# what a site asks for, GPUs and how many ranks a node has, come from the environment:
# SBATCH="sbatch --account=abc --gpus-per-task=1 --ntasks-per-node=4".
# The exit code is 0 when all runs have finished (with --slurm: when all jobs are submitted), 1 when some have not, or were
# refused, 2 for wrong use, 128 + number after a signal.
set -euo pipefail
recipe='' data='' out='' ranks='1 2 4 8' times=3 weak='' slurm='' options=()
while [[ $# -gt 0 ]]; do
    case $1 in
    --data | --out | --ranks | --times | --weak)
        [[ $# -gt 1 ]] || { echo "scaling.sh: $1 needs a value" >&2 && exit 2; }
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
    --slurm) slurm=1 && shift ;;
    -h | --help) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" && exit ;;
    --*)
        options+=("$1")
        shift
        [[ $# -eq 0 || $1 == --* ]] || { options+=("$1") && shift; }
        ;;
    *) recipe=$1 && shift ;;
    esac
done
if [[ -z $recipe || -z $data || -z $out ]]; then
    echo 'usage: scaling.sh RECIPE --data DIR --out DIR [--ranks "1 2 4 8"] [--times 3] [--weak N] [--slurm] [options]' >&2
    exit 2
fi
if [[ ! $times =~ ^[1-9][0-9]{0,3}$ || ! $ranks =~ ^\ *[1-9][0-9]*(\ +[1-9][0-9]*)*\ *$ ]]; then
    echo "scaling.sh: --ranks '$ranks' --times '$times': must be whole numbers from 1" >&2
    exit 2
fi
if [[ -n $weak && ! $weak =~ ^[1-9][0-9]{0,8}$ ]]; then
    echo "scaling.sh: --weak '$weak': must be the number of images per rank, from 1" >&2
    exit 2
fi
batch() { [[ -z $weak ]] || printf -- '--set\ntrain.batch_size=%s\n' $((weak * $1)); } # for a number of ranks
repeat=(trainer repeat "$recipe" --data "$data" --seeds "$times" ${options[@]+"${options[@]}"})
for n in $ranks; do mkdir -p "$out/ranks-$n"; done # so that it is in the table, however it fails

if [[ -n $slurm ]]; then
    submit() { ${SBATCH:-sbatch} --parsable --job-name="scaling-$1" --output="$out/slurm-%j.log" "${@:2}"; }
    jobs=()
    for n in $ranks; do
        mapfile -t sized < <(batch "$n")
        line=$(printf '%q ' "${repeat[@]}" ${sized[@]+"${sized[@]}"} --out "$out/ranks-$n" --ranks "$n" --launcher srun)
        jobs+=("$(submit "$n" --ntasks="$n" --wrap "$line")")
    done
    after=$(IFS=: && echo "${jobs[*]}")
    line=$(printf '%q ' python -P -m trainer.measuring.scaling "$out")
    jobs+=("$(submit table --ntasks=1 --dependency="afterany:$after" --wrap "$line")")
    echo "jobs ${jobs[*]}; the last one writes $out/scaling.txt and the plot"
    exit
fi

child='' refused=0
end() { # lets the run save its checkpoint
    [[ -z $child ]] || { kill -TERM "$child" && wait "$child"; } || true
    exit "$1"
}
trap 'end 143' TERM
trap 'end 130' INT
for ((i = 0; i < times; i++)); do
    for n in $ranks; do
        code=0
        mapfile -t sized < <(batch "$n")
        "${repeat[@]}" ${sized[@]+"${sized[@]}"} --out "$out/ranks-$n" --ranks "$n" --index "$i" >/dev/null &
        child=$!
        wait "$child" || code=$?
        child=''
        [[ $code -ne 75 && $code -le 128 ]] || exit "$code" # the time is over, or a signal came
        [[ $code -ne 2 ]] || refused=1                      # as where the batch does not divide: others may do
    done
done
python -P -m trainer.measuring.scaling "$out"
exit "$refused"
