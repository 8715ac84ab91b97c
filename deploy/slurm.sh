#!/bin/bash
# A service over the nodes of one allocation, as long as that lasts; the state folder outlives it.
#SBATCH --job-name=autotune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Tokens are made beforehand: autotune serve token create --role admin --state "$HOME/autotune-service"
srun ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_NNODES" -- \
  autotune serve --host 0.0.0.0 --state "$HOME/autotune-service" --executor ray --address "$head:6379" &
trap 'kill -TERM $!; wait $!' TERM
wait $!
