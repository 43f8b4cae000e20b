#!/usr/bin/env bash
# Starts one process per device, as msrun does, and fails when one of them fails. The arguments are those of MindSpore Transformers.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
Usage: bash scripts/msrun_launch.sh COMMAND [WORKER_NUM] [LOCAL_WORKER] [MASTER_ADDR] [MASTER_PORT] [NODE_RANK] [LOG_DIR] [JOIN] [CLUSTER_TIME_OUT]
       bash scripts/msrun_launch.sh COMMAND WORKER_NUM MASTER_PORT LOG_DIR JOIN CLUSTER_TIME_OUT

  COMMAND           a Python script with its arguments, or "-m MODULE …", in one pair of quotes
  WORKER_NUM        processes on all machines together (8)
  LOCAL_WORKER      processes on this machine (WORKER_NUM)
  MASTER_ADDR       address of the first machine (127.0.0.1)
  MASTER_PORT       port of the scheduler there (8118); 0 takes a free one, on one machine only
  NODE_RANK         number of this machine, from 0 (0)
  LOG_DIR           folder for worker_N.log and scheduler.log (output/msrun_log); those of an earlier launch are removed
  JOIN              True: wait for the workers, show the first one's output, fail when one fails (True).
                    False: start them and return at once; nobody then notices a failure
  CLUSTER_TIME_OUT  seconds to wait until all processes have met (7200)

The environment variables RESTARTS, MIN_WORKERS, EXCLUDE, REJOIN_TIMEOUT, BACKOFF and TIME_LIMIT start it again after a
death; GRACE are the seconds that workers have after SIGTERM: docs/recovery.md.

Examples:
  bash scripts/msrun_launch.sh "-m mindformers_core train --config configs/llama_tiny_cpu.yaml" 4
  RESTARTS=10 bash scripts/msrun_launch.sh "-m mindformers_core train --config configs/llama_tiny_cpu.yaml checkpoint.enable_save=true" 4
  Two machines with 8 devices each, run on both with their own NODE_RANK:
  bash scripts/msrun_launch.sh "-m mindformers_core train --config configs/llama3_8b.yaml parallelism.data_parallel_shard=16" 16 8 192.168.1.1 8118 0
TEXT
}

case ${1:-} in
-h | --help) usage && exit 0 ;;
"") usage >&2 && exit 2 ;;
esac
[ $# -le 9 ] || fail "takes at most 9 arguments, not $# (is COMMAND in quotes?): bash $0 -h"

split_command "$1"
worker_num=${2:-8}
if [ $# = 6 ] && [[ $5 =~ ^(True|False)$ ]]; then
    set -- "$1" "$2" "$2" 127.0.0.1 "$3" 0 "$4" "$5" "$6"
fi
python=$(launch_python) || exit 1
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
local_workers=${3:-$worker_num}
workers=$worker_num machine=${6:-0}
supervisor=()
command=("${COMMAND_WORDS[@]}")
if [ "${RESTARTS:-0}" != 0 ]; then
    supervisor=("$python" "$ROOT/scripts/supervisor.py" --workers "$worker_num" --local_workers "$local_workers"
        --machine "${6:-0}" --log_dir "${7:-output/msrun_log}" --launch)
    command=(--command "${COMMAND_WORDS[@]}")
    [ "${8:-True}" = True ] || fail "RESTARTS needs JOIN True: with False nobody notices a failure"
    workers="{workers}" machine="{machine}"
    [ "$local_workers" != "$worker_num" ] || local_workers="{workers}"
    [ "$local_workers" = "{workers}" ] || [ -z "${EXCLUDE:-}" ] ||
        fail "EXCLUDE names processes of one machine, and this job has several: leave it out"
fi
exec "${supervisor[@]}" "$python" "$ROOT/scripts/launch.py" --worker_num="$workers" \
    --local_worker_num="$local_workers" --master_addr="${4:-127.0.0.1}" --master_port="${5:-8118}" \
    --node_rank="$machine" --log_dir="${7:-output/msrun_log}" --join="${8:-True}" \
    --cluster_time_out="${9:-${REJOIN_TIMEOUT:-7200}}" -- "${command[@]}"
