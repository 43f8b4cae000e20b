"""Runs `case_*` functions on this rank, one after the other; started by `tests/support/launch.py` under msrun.

How to write a multi-rank test:
1. Make a file `tests/ranks/case_<topic>.py` with `from support.launch import on_ranks`.
2. In it, functions `case_<what>()` without arguments, decorated `@on_ranks(2)`, `@on_ranks(2, 4)` or, to run on more
   ranks only at night, `@on_ranks(4, nightly=(8,))`.
   Every rank calls the function; communication is initialised: `from mindformers_core.communication import world`.
3. Check with `assert`, `np.testing.assert_allclose` or `pytest.raises` on every rank. Loop over parameters inside.
4. `pytest tests/test_ranks.py -k case_<what>` runs it; it is found by reading the file, there is no list to add to.
All cases of one world size share one launch, in the same order on all ranks, MindSpore's and NumPy's seeds reset and
PyNative mode restored before each. A failure on any rank fails the case; where a rank then waits for a partner that has
failed, the launch ends and a new one runs the rest. Keep a case to a few seconds: pytest prints the slowest at its end.
"""

import faulthandler
import gc
import importlib
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path

import mindspore as ms
import numpy as np

from mindformers_core.communication import init_distributed

PATIENCE = 5.0  # seconds that ranks wait for another one after a failure, until they end the launch


def main(results, case_timeout, cases):
    """Run all cases; every rank leaves `INDEX.RANK.json` for each in the folder `results`."""
    world = init_distributed(timeout=case_timeout / 2)  # a slow machine is no failure; before `faulthandler` ends all
    for index, case in enumerate(cases):
        faulthandler.dump_traceback_later(case_timeout, exit=True)
        gc.collect()
        gc.freeze()  # else each search for optimizers, of `shard()` and `hsdp()`, looks at what earlier cases have left
        start, start_cpu = time.monotonic(), time.process_time()
        report = {"case": case, "failure": run(case), "seconds": round(time.monotonic() - start, 2)}
        report["cpu_seconds"] = round(time.process_time() - start_cpu, 2)
        report["peak_memory"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes, on Linux
        print(f"{case}: {report['seconds']} s", flush=True)
        write(results, index, world.rank, report)
        if not together(results, index, world.size):
            print(f"{case}: a rank failed and another one is stuck; ending this launch", flush=True)
            os._exit(1)
    faulthandler.cancel_dump_traceback_later()


def run(case):
    """The traceback of one case on this rank, or None."""
    module, function = case.split("::")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_seed(0)
    np.random.seed(0)
    try:
        getattr(importlib.import_module(module), function)()
        ms.runtime.synchronize()
    except Exception:  # everything that a case can raise is its result, written for the launcher
        print(f"{case} failed:\n{traceback.format_exc()}", flush=True)
        return traceback.format_exc()
    return None


def write(results, index, rank, report):
    """Write atomically: other ranks and the launcher look at these files."""
    path = results / f"{index}.{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(report))
    path.with_suffix(".part").rename(path)


def together(results, index, size):
    """Wait until all ranks have ended the case; False when one failed and another doesn't come."""
    deadline = None
    while True:
        reports = [results / f"{index}.{rank}.json" for rank in range(size)]
        done = [report for report in reports if report.exists()]
        if len(done) == size:
            return True
        if deadline is None and any(json.loads(report.read_text())["failure"] for report in done):
            deadline = time.monotonic() + PATIENCE
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(0.002)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
