"""Measures which of MindSpore's public functions become parallel, each called with a sample of its own.

python scripts/operator_coverage.py                        # everything: a table, and what is missing, as text
python scripts/operator_coverage.py --json FILE            # the same as data, too
python scripts/operator_coverage.py --only mint.acosh nn   # some functions or namespaces, with their errors
python scripts/operator_coverage.py --operator AcoshExt    # all functions that call these operators, of the last --json
python scripts/operator_coverage.py --record tests/operator_coverage.json
python scripts/operator_coverage.py --numbers              # numbers and gradients of what runs on CPU, too (verify)

Functions are measured in processes of their own, since kernels of MindSpore may crash: that costs one function.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

__all__ = ["main", "measure_all"]

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
sys.path.append(str(ROOT / "tests"))  # operator_samples
LONGEST = 120  # seconds that a function may take
LAST = Path(os.environ.get("OPERATOR_COVERAGE", "/tmp/operator_coverage.json"))


def arguments(given):
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=(), help="functions, namespaces, or primitives, expressions")
    parser.add_argument("--operator", nargs="+", default=(), help="functions that call one of these operators")
    text = "compare numbers and gradients, too, for single cuts, and for this many pairs of cuts"
    parser.add_argument("--numbers", type=int, nargs="?", const=0, metavar="PAIRS", help=text)
    parser.add_argument("--json", type=Path, help="where the outcomes are written")
    parser.add_argument(
        "--record", type=Path, help="where the counts are written, and what isn't covered (for the test)"
    )
    parser.add_argument("--last", type=Path, default=LAST, help="outcomes that --operator reads")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def work(order):
    """Measure the targets of an order, one line of JSON each: what a process of its own does."""
    import mindspore as ms
    from operator_samples.trying import outcome_of

    ms.runtime.launch_blocking()
    order = json.loads(order.read_text("utf-8"))
    with Path(order["results"]).open("a", encoding="utf-8") as out:

        def note(line):
            print(json.dumps(line), file=out, flush=True)

        for target in order["targets"]:
            skipped = order["crashed"].get(target, [])
            trying = partial(_trying, note, target)
            note(outcome_of(target, skipped, trying, order["numbers"]).as_dict())


def _trying(note, target, text, device):
    note({"trying": [target, text, device]})


def measure_all(targets, folder, numbers=None):
    """Target -> its outcome, a dict.

    Args:
        targets: functions.
        folder: an empty folder for the work.
        numbers: see `outcome_of`.

    Returns:
        The outcomes in the order of `targets`. A function at which MindSpore ends the process, or which takes longer
        than two minutes, is called no further in that way; a new process continues after it.
    """
    found, crashed, folder = {}, {}, Path(folder)
    results, order, errors = folder / "results.jsonl", folder / "order.json", folder / "errors"
    while left := [target for target in targets if target not in found]:
        results.write_text("")
        order.write_text(json.dumps(dict(results=str(results), targets=left, crashed=crashed, numbers=numbers)))
        with errors.open("w", encoding="utf-8") as out:
            code = _finished(subprocess.Popen(_command(order), env=_environment(), stdout=out, stderr=out), results)
        lines = [json.loads(line) for line in results.read_text("utf-8").splitlines()]
        found |= {line["target"]: line for line in lines if "target" in line}
        if lines and "trying" in lines[-1]:
            target, text, device = lines[-1]["trying"]
            crashed.setdefault(target, []).append([text, device])
        elif code and len(found) < len(targets):
            raise RuntimeError(errors.read_text("utf-8")[-3000:])
    return {target: found[target] for target in targets}


def _command(order):
    return [sys.executable, str(HERE), "--worker", str(order)]


def _environment():
    """The environment of a worker: with the package of this repository, if no other is given."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
    return {"GLOG_v": "4", **os.environ, "PYTHONPATH": path}


def _finished(process, results):
    """The exit code of a worker, which is ended where it writes nothing for long."""
    size, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        if results.stat().st_size != size:
            size, since = results.stat().st_size, time.monotonic()
        elif time.monotonic() - since > LONGEST:
            process.kill()
    return process.wait()


def chosen(options, spaces):
    """The targets that were asked for, by namespace."""
    if options.operator:
        last = json.loads(options.last.read_text("utf-8"))
        wanted = {t for t, each in last.items() if set(each["operators"] + each["missing"]) & set(options.operator)}
    else:
        wanted = {target for name in options.only for target in spaces.get(name, [name])}
    if not options.only and not options.operator:
        return spaces
    return {space: [t for t in targets if t in wanted] for space, targets in spaces.items()}


def main(given=None):
    """Run the command line; returns the exit code."""
    options = arguments(given)
    if options.worker is not None:
        work(options.worker)
        return 0
    from operator_samples.choice import all_targets
    from operator_samples.report import details, recorded, report

    spaces = chosen(options, all_targets())
    with tempfile.TemporaryDirectory() as folder:
        found = measure_all([target for targets in spaces.values() for target in targets], folder, options.numbers)
    if options.json:
        options.json.write_text(json.dumps(found, indent=0), encoding="utf-8")
    if options.record:
        options.record.write_text(recorded(spaces, found), encoding="utf-8")
    if options.only or options.operator:
        print(details(found))
    print(report(spaces, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
