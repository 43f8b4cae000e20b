#!/usr/bin/env bash
# Starts one process per GPU with mpirun (NCCL). Fails when one of them fails, as mpirun does.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

usage() {
    cat <<'TEXT'
Usage: bash scripts/mpirun_launch.sh COMMAND [WORKER_NUM] [HOSTFILE]

  COMMAND     a Python script with its arguments, or "-m MODULE …", in one pair of quotes
  WORKER_NUM  processes on all machines together (8)
  HOSTFILE    Open MPI's list of machines ("address slots=8" a line); default: this machine alone

The environment variables RESTARTS, MIN_WORKERS, EXCLUDE, REJOIN_TIMEOUT, BACKOFF and TIME_LIMIT start it again after a
death: docs/recovery.md. What processes tell the supervisor lies in output/mpirun_log, which all machines have to see.

The program calls init_distributed(), which is init("nccl") here. Example:
  bash scripts/mpirun_launch.sh "-m mindformers_core train --config configs/llama3_8b.yaml context.device_target=GPU" 8
TEXT
}

case ${1:-} in
-h | --help) usage && exit 0 ;;
"") usage >&2 && exit 2 ;;
esac
[ $# -le 3 ] || fail "takes at most 3 arguments, not $# (is COMMAND in quotes?): bash $0 -h"
split_command "$1"
worker_num=${2:-8}
[[ $worker_num =~ ^[1-9][0-9]*$ ]] || fail "WORKER_NUM is a number from 1 up, not '$worker_num'"
if [ -n "${3:-}" ] && [ ! -f "$3" ]; then
    fail "HOSTFILE $3 doesn't exist"
fi

missing=""
command -v mpirun >/dev/null || missing="mpirun (install Open MPI 4.x); "
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
[ "$gpus" -gt 0 ] || missing="${missing}an NVIDIA GPU with its driver (nvidia-smi shows none); "
[ -z "$missing" ] || fail "missing here: ${missing}on a machine with CPUs only use 'bash scripts/msrun_launch.sh' instead"
if [ -z "${3:-}" ] && [ "$worker_num" -gt "$gpus" ]; then
    fail "WORKER_NUM is $worker_num, but this machine has $gpus GPUs: give at most $gpus, or a HOSTFILE"
fi

python=$(launch_python) || exit 1
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
options=(-n "$worker_num" --tag-output)
[ "$(id -u)" != 0 ] || options+=(--allow-run-as-root)
[ -z "${3:-}" ] || options+=(--hostfile "$3" -x PYTHONPATH -x PATH)
supervisor=()
command=("${COMMAND_WORDS[@]}")
if [ "${RESTARTS:-0}" != 0 ]; then
    [ -z "${EXCLUDE:-}" ] || [ -z "${3:-}" ] || fail "EXCLUDE names processes of one machine, not of a HOSTFILE: leave it out"
    supervisor=("$python" "$ROOT/scripts/supervisor.py" --workers "$worker_num" --log_dir output/mpirun_log --launch)
    command=(--command "${COMMAND_WORDS[@]}")
    options[1]="{workers}"
    options+=(-x MINDFORMERS_SUPERVISOR -x MINDFORMERS_RESTART -x MINDFORMERS_WORKERS)
fi
exec "${supervisor[@]}" mpirun "${options[@]}" "$python" "${command[@]}"
