#!/bin/bash
# A service over the nodes of one allocation, as long as that lasts; the state folder outlives it.
# sbatch deploy/slurm.sh; its output has a token, and how to reach the service from elsewhere.
# With --host 0.0.0.0 --tls-certificate FILE --tls-key FILE others reach it directly.
#SBATCH --job-name=autotune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
set -euo pipefail
state=${AUTOTUNE_STATE:-$HOME/autotune-service}
disk=$(stat -f -c %T "$(dirname "$state")")
case $disk in nfs* | lustre | gpfs | beegfs | ceph | afs | cifs | smb* | fuse* | UNKNOWN*)
  if [[ -z ${AUTOTUNE_DATABASE:-} ]]; then
    echo "$state is on $disk, which several nodes share: SQLite may lose what it has written there." \
      "Set AUTOTUNE_STATE to a folder on a node's own disk, or AUTOTUNE_DATABASE to a PostgreSQL." >&2
    exit 2
  fi ;;
esac
if [[ " $* " == *" --host"* && " $* " != *" --tls-certificate"* ]]; then
  echo "--host: without --tls-certificate and --tls-key, tokens and code would be readable on the network." \
    "Leave it out: ssh -L reaches the service." >&2
  exit 2
fi
# Ports by the job's number: two jobs may share a node.
port=$((20000 + SLURM_JOB_ID % 5000)) web=$((25000 + SLURM_JOB_ID % 5000))
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahostsv4 "$head" | awk 'NR == 1 {print $1}')
# Nobody else on these nodes may run code in this Ray.
RAY_AUTH_TOKEN=$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
srun bash -c '
  options="--block --disable-usage-stats --min-worker-port=0 --max-worker-port=0"
  if [[ $SLURM_NODEID == 0 ]]; then
    exec ray start --head --node-ip-address="$1" --port="$2" --include-dashboard=false --temp-dir="/tmp/ray-$SLURM_JOB_ID" $options
  fi
  until (: >"/dev/tcp/$1/$2") 2>/dev/null; do sleep 1; done
  exec ray start --address="$1:$2" $options' - "$address" "$port" &
ray=$!
until (: >"/dev/tcp/$address/$port") 2>/dev/null; do kill -0 "$ray"; sleep 1; done
autotune serve --port "$web" --state "$state" --executor ray --address "$address:$port" "$@" &
service=$!
echo "From elsewhere: ssh -L $web:127.0.0.1:$web $head"
# The service ends before its Ray, so that its trials do, too. Whichever ends by itself ends the job.
trap : TERM
wait -n "$ray" "$service" || true
kill -TERM "$service" 2>/dev/null || true
code=0
wait "$service" || code=$?
kill -TERM "$ray" 2>/dev/null || true
wait "$ray" || true
rm -rf "/tmp/ray-$SLURM_JOB_ID"
exit "$code"
