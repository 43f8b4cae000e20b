#!/usr/bin/env bash
# Makes or reuses .venv, then runs ruff and all tests. Arguments go to pytest: bash scripts/test.sh -k layout -x
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

cd "$ROOT"
prepare_environment
export GLOG_v=${GLOG_v:-3}
unset PYTHONDONTWRITEBYTECODE # which images of Python set: each of some 100 processes would compile the package anew
if [ $# -eq 0 ]; then # in three parts: what needs no launch on both cores first
    failed=0
    bash scripts/test.sh -m "not ranks and not long and not nightly" || failed=1
    bash scripts/test.sh -m "long and not ranks and not nightly" || failed=1
    bash scripts/test.sh -m "ranks and not nightly" || failed=1
    exit $failed
fi
case "$*" in *"not ranks"*) set -- -n 2 "$@" ;; esac # no launch needs the other core
.venv/bin/python -m ruff check .
exec .venv/bin/python -m pytest "$@"
