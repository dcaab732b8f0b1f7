#!/bin/bash
# A run over the nodes of a Slurm job: one `ray start` on each node, `miles run` on the first. See docs/clusters.md.
#
#   sbatch --nodes=4 launch/slurm.sh recipe.toml --run-dir /shared/runs/a [FLAG]...
#
# The words after the script are those of `miles run`. Submitted again, the job goes on from the last checkpoint where
# `load` and `save` are one folder.
#SBATCH --job-name=miles
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@240
#SBATCH --output=miles-%j.log
set -euo pipefail

environment=${MILES_VENV:-.venv}             # a virtual environment with Miles, at one path on all nodes
start_timeout=${MILES_START_TIMEOUT:-300}    # seconds in which a node has to join
stop_timeout=${MILES_STOP_TIMEOUT:-60}       # seconds that the run has to end, and Ray after it
read -ra ray_words <<<"${MILES_RAY_WORDS:-}" # further words of `ray start`

session=/tmp/ray-$SLURM_JOB_ID               # short: it is a part of names of sockets
port=$((20000 + SLURM_JOB_ID % 10000))       # jobs that share a node need ports of their own
logs=$(mktemp -d)
cpus=${SLURM_CPUS_PER_TASK:-1}
step=(srun --export=ALL --ntasks-per-node=1 --cpus-per-task="$cpus")
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
declare -A steps=()                          # node -> process of its srun
run=

PATH=$(realpath "$environment")/bin:$PATH
# Whoever reaches a Ray without a token can run code there as this user.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export PATH RAY_AUTH_TOKEN RAY_AUTH_MODE=token

address() { # NODE
  getent ahostsv4 "$1" | awk 'NR == 1 { print $1 }' || { echo "no address is known of node $1" >&2 && return 1; }
}

start_ray() { # NODE ADDRESS WORDS...
  "${step[@]}" --nodes=1 --ntasks=1 --nodelist="$1" ray start --block --disable-usage-stats --node-ip-address="$2" \
    --num-cpus="$cpus" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" "${@:3}" "${ray_words[@]}" >"$logs/$1" 2>&1 &
  steps[$1]=$!
}

await_ray() { # NODE
  local end=$((SECONDS + start_timeout))
  until grep -q "Ray runtime started" "$logs/$1"; do
    if ((SECONDS >= end)) || ! kill -0 "${steps[$1]}" 2>/dev/null; then
      echo "Ray has not started on $1 (MILES_START_TIMEOUT: $start_timeout s); its last words:" >&2
      tail -n 20 "$logs/$1" >&2
      return 1
    fi
    sleep 0.5
  done
}

stop() { # PROCESS...
  local end=$((SECONDS + stop_timeout)) process
  kill -TERM "$@" 2>/dev/null || true
  for process; do
    while kill -0 "$process" 2>/dev/null && ((SECONDS < end)); do sleep 0.2; done
    kill -KILL "$process" 2>/dev/null || true
  done
}

clean_up() {
  local status=$?
  trap '' TERM INT
  [[ -z $run ]] || stop "$run"
  ((${#steps[@]} == 0)) || stop "${steps[@]}"
  if ((status == 0)); then
    timeout "$stop_timeout" "${step[@]}" --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" rm -rf "$session" || true
  else
    echo "exit status $status; Ray's logs are in $session of each node" >&2
  fi
  rm -rf "$logs"
  exit "$status"
}
trap clean_up EXIT
trap 'exit 143' TERM INT # by --signal before the time is up, or by `scancel --batch --signal=TERM`

head=${MILES_HEAD_ADDRESS:-$(address "${nodes[0]}")}
start_ray "${nodes[0]}" "$head" --head --port="$port" --include-dashboard=false --temp-dir="$session"
await_ray "${nodes[0]}"
for node in "${nodes[@]:1}"; do start_ray "$node" "$(address "$node")" --address="$head:$port"; done
for node in "${nodes[@]:1}"; do await_ray "$node"; done

miles run "$@" --placement ray --ray-address "$head:$port" &
run=$!
status=0
wait "$run" || status=$?
run=
exit "$status"
