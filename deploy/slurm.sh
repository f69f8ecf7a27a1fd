#!/bin/bash
# PI0.5 on four nodes with one GPU each: sbatch deploy/slurm.sh
# Needs a disk that all nodes share, with this repository (`make setup`), the dataset and the base model.
#SBATCH --job-name=vlatune-fold
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

shared=${VLATUNE_SHARED:-$SLURM_SUBMIT_DIR}
export PATH="$shared/.venv/bin:$PATH" HF_HOME="$shared/huggingface"
# Ray's settings of a run's own cluster: training at normal priority, consumed blocks freed at once.
export RAY_worker_niceness=0 RAY_free_objects_period_milliseconds=100
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

# This script runs on the first node, which becomes Ray's head.
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
ip=$(hostname -I | cut -d ' ' -f 1)
export RAY_ADDRESS="$ip:$((20000 + SLURM_JOB_ID % 10000))"
node=(--block --disable-usage-stats --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="${SLURM_GPUS_ON_NODE:-0}")

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --node-ip-address="$ip" \
    --port="${RAY_ADDRESS#*:}" --include-dashboard=false --temp-dir="/tmp/ray-$SLURM_JOB_ID" "${node[@]}" &
until ray health-check --address="$RAY_ADDRESS" >/dev/null 2>&1; do sleep 1; done
others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then
    srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" \
        ray start --address="$RAY_ADDRESS" "${node[@]}" &
fi
# vlatune plans for the nodes that it finds.
python - "$SLURM_JOB_NUM_NODES" <<'PYTHON'
import sys, time, ray
ray.init(logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(1)
PYTHON

# SLURM sends USR1 before the time limit. vlatune saves a checkpoint on TERM, and the same command resumes.
requeue=no
trap 'requeue=yes; kill -TERM "$driver" || true' USR1
trap 'kill -TERM "$driver" || true' TERM
vlatune train --recipe=pi05-expert --policy.path=lerobot/pi05_base \
    --dataset.root="$shared/data/fold" --job_name=fold --output_dir="$shared/runs/fold" \
    --num_workers="$SLURM_JOB_NUM_NODES" --batch_size=8 --grace_s=60 &
driver=$!
while kill -0 "$driver" 2>/dev/null; do
    wait "$driver" || true # also returns when a signal arrives, while vlatune still saves
done
code=0
wait "$driver" || code=$?
if [ "$requeue" = yes ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
