#!/bin/bash
# Train on several machines under SLURM:  sbatch --nodes 4 examples/slurm.sh CONFIG [section.key=value ...]
#
# One torchrun per machine starts one process per GPU. A process that dies is started again with all others, from the
# newest checkpoint; SLURM's own SIGTERM, two minutes before the time is up, saves, and the job queues itself again.
# torchrun gives its processes 30 seconds for that.
#SBATCH --job-name=octavo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --output=%x-%j.log

set -euo pipefail
config=${1:?give a configuration: sbatch examples/slurm.sh CONFIG}
shift
out=${OUT:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# --resume wants the folder of a run; a requeued job has one.
resume=()
if [ -d "$out/checkpoints" ]; then resume=(--resume); fi

status=0
srun torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node gpu --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29500" \
    -m octavo train "$config" "$@" --out "$out" "${resume[@]}" || status=$?

# Stopped before its last step, and saved: go on when there is room again.
if grep -q '"stopped": "sigterm"' "$out/run.json"; then
    scontrol requeue "$SLURM_JOB_ID"
else
    exit $status
fi
