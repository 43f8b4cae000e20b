#!/usr/bin/env bash
# Trains a small Llama on 4 processes (data parallel 2 x tensor parallel 2), again on one; the loss curves must be one, and fall.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

cd "$ROOT"
prepare_environment
export GLOG_v=${GLOG_v:-3}
results=output/quickstart
rm -rf "$results"

echo "== 1/3  4 ranks: data parallel 2 x tensor parallel 2"
bash scripts/msrun_launch.sh \
    "-m mindformers_core train --config configs/llama_tiny_cpu.yaml training.output_dir=$results/4_ranks" \
    4 4 127.0.0.1 0 0 "$results/msrun_log" True 120

echo "== 2/3  the same recipe on 1 rank"
.venv/bin/python -m mindformers_core train --config configs/llama_tiny_cpu_1p.yaml "training.output_dir=$results/1_rank"

echo "== 3/3  the loss curves of both: the same, and falling"
.venv/bin/python -m mindformers_core compare "$results/4_ranks" "$results/1_rank" --threshold 1e-4 --fell 0.7

echo "Done in $SECONDS s. To go on in this shell: source .venv/bin/activate"
echo "Metrics, picture and resolved recipe: $ROOT/$results/4_ranks and $ROOT/$results/1_rank"
