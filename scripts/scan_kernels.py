"""Scans MindSpore's kernels on CPU: bits that change from call to call, and numbers that aren't NumPy's at extremes.

python scripts/scan_kernels.py                        # everything: 2,000 calls each, half an hour
python scripts/scan_kernels.py --calls 50             # fewer
python scripts/scan_kernels.py --only CumProd Softmax # some operators
python scripts/scan_kernels.py --record docs/kernels.md

Each operator is called, forward and with its gradient, by a public function of `operator_samples` that has a kernel,
on tensors that are as long as its sample allows, while another process keeps a core busy. Extremes go through the calls
of tests/operator_calls, as generated code writes them: with what `lowering/corrected.py` puts in
their place.
A process of its own does the work, since kernels may crash: that costs one entry.
"""

import argparse
import datetime
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from pathlib import Path

__all__ = ["main", "scan"]

HERE = Path(__file__).resolve()
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
LONGEST = 600  # seconds that an entry may take
_EXTREMES = (
    "Numbers are equal, small (the least normal ones, and 0), large (20, and 1e18, or in float16 64), infinite, NaN, "
    "in float32, float64 and float16 where there is a kernel. The first element that differs is shown. Some of NumPy's "
    "results are a convention; docs/mindspore.md says what matters."
)


def arguments(given):
    """The parsed command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2000, help="of each function, and of its gradient")
    parser.add_argument("--seconds", type=float, default=3600, help="after which no further entry is begun")
    parser.add_argument("--only", nargs="+", default=(), help="names of operators")
    parser.add_argument("--record", type=Path, help="where the page with the table is written")
    parser.add_argument("--coverage", type=Path, help="what operator_coverage.py --json wrote; default: it runs anew")
    parser.add_argument("--folder", type=Path, help="for results, which a later scan goes on with")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(given)


def entries(coverage, only=()):
    """What is scanned: `["bits", operator, target, text]`, and `["extremes", operator, number of the call, its text]`.

    Args:
        coverage: target -> outcome of `operator_coverage.measure_all`, a dict.
        only: names of operators; empty for all.
    """
    from operator_calls import ALL_CALLS

    from mindformers_core.operators.registry import facts_of

    shortest, users = {}, Counter()
    for target, found in sorted(coverage.items(), key=lambda entry: len(entry[1]["operators"])):
        users.update(found["operators"])
        if found["cpu"] and not any(facts_of(name).draws for name in found["operators"]):
            for name in found["operators"]:
                shortest.setdefault(name, (target, found["sample"]))
    made = [["bits", name, *shortest[name]] for name, _ in users.most_common() if name in shortest]
    calls = [(number, call) for number, call in enumerate(ALL_CALLS) if call.runs == "CPU" and not call.broken]
    made += [["extremes", call.name, number, str(call)] for number, call in calls]
    return [entry for entry in made if not only or entry[1] in only]


def work(order):
    """Scan the entries of an order, one line of JSON before each, and one after it: what a process of its own does."""
    import mindspore as ms
    from operator_calls import ALL_CALLS
    from operator_samples.extremes import compared
    from operator_samples.repeats import repeated
    from operator_samples.stable import FUNCTIONS

    ms.runtime.launch_blocking()
    order = json.loads(order.read_text("utf-8"))
    with Path(order["results"]).open("a", encoding="utf-8") as out:
        for kind, name, what, text in order["entries"]:
            if time.time() > order["end"]:
                return
            entry = [kind, name, what, text]
            print(json.dumps([entry, {"crashed": True}]), file=out, flush=True)
            if kind == "bits":
                found = repeated(what, text, order["calls"])
            else:
                found = compared(ALL_CALLS[what], FUNCTIONS.get(name, ALL_CALLS[what].function))
            print(json.dumps([entry, found]), file=out, flush=True)


def scan(todo, calls, folder, seconds=math.inf):
    """Pairs of an entry and what was found, a dict; `{"crashed": True}` where MindSpore ends the process, or hangs.

    Args:
        todo: entries.
        calls: of each.
        folder: for the work. What its `results.jsonl` has already isn't scanned again.
        seconds: after which no further entry is begun.
    """
    results, order, errors = (folder / name for name in ("results.jsonl", "order.json", "errors"))
    results.touch()
    end, begun = min(time.time() + seconds, 1e12), -1
    while True:
        done = {json.dumps(entry): found for entry, found in map(json.loads, results.read_text("utf-8").splitlines())}
        left = [entry for entry in todo if json.dumps(entry) not in done]
        if not left or time.time() > end:
            return [(entry, done[json.dumps(entry)]) for entry in todo if json.dumps(entry) in done]
        if len(left) == begun:
            raise RuntimeError(errors.read_text("utf-8")[-3000:])
        begun = len(left)
        order.write_text(json.dumps({"results": str(results), "entries": left, "calls": calls, "end": end}))
        results.touch()  # the time from which a worker is silent
        with errors.open("w", encoding="utf-8") as out:
            _finished(subprocess.Popen([sys.executable, str(HERE), "--worker", str(order)], stderr=out), results)


def _finished(process, results):
    """Wait for a worker, which is ended where it writes nothing for long; meanwhile another process is busy."""
    while_we_live = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    busy = subprocess.Popen([sys.executable, "-c", while_we_live], preexec_fn=lambda: os.nice(19))
    try:
        while process.poll() is None:
            if time.time() - results.stat().st_mtime > LONGEST:
                process.kill()
            time.sleep(0.2)
    finally:
        for each in (busy, process):
            each.kill()
            each.wait()


def page(done, todo):
    """The tables as Markdown.

    Args:
        done, todo: of `scan`.
    """
    bits = [(name, found) for (kind, name, *_), found in done if kind == "bits" and "crashed" not in found]
    counted = {kind: sum(type(found[kind]) is int for _, found in bits) for kind in ("forward", "gradient")}
    changing = [(name, found) for name, found in bits if any(type(found[k]) is int and found[k] for k in counted)]
    rows = [f"| {name} | {found['forward']} | {found['gradient']} |" for name, found in changing]
    crashed = sorted({name for (_, name, *_), found in done if "crashed" in found})
    compared = [(text, found) for (kind, *_, text), found in done if kind == "extremes" and "crashed" not in found]
    known = [entry for entry, _ in done]
    missing = sorted({name for kind, name, *rest in todo if [kind, name, *rest] not in known})
    long = sum(found["long"] for _, found in bits)
    times = Counter(found["calls"] for _, found in bits).most_common()
    each = ", ".join(f"{calls:,} times {number} operators" for calls, number in times)
    machine = f"{platform.platform(terse=True)} with {os.cpu_count()} cores"
    left = f" Time didn't suffice for: {', '.join(missing)}." if missing else ""
    head = (
        f"Written by `scripts/scan_kernels.py --record` on {datetime.date.today()}, on {machine}. "
        f"MindSpore ends the process in: {', '.join(crashed) or 'none'}.{left}"
    )
    constancy = (
        f"{counted['forward']} operators were called, and {counted['gradient']} gradients taken, with equal inputs "
        f"while other processes were busy: {each}; {long} of them on long tensors. "
        + ("These change:" if rows else "All bits were those of the first call.")
    )
    extremes = f"{len(compared)} calls, as generated code writes them, were compared with NumPy. {_EXTREMES}"
    lines = [
        "# Kernels on CPU\n",
        f"{textwrap.fill(head, 120)}\n",
        "## Bits\n",
        f"{textwrap.fill(constancy, 120)}\n",
        *(["| operator | calls that differ | gradients that differ |", "|---|---|---|", *rows, ""] if rows else []),
        "## Extremes\n",
        f"{textwrap.fill(extremes, 120)}\n",
        "| call | numbers | kernel and NumPy |",
        "|---|---|---|",
        *(f"| `{text}` | {where} | {what} |" for text, found in compared for where, what in found.items()),
    ]
    return "\n".join(lines) + "\n"


def main(given=None):
    """Run the command line; returns the exit code."""
    options = arguments(given)
    if options.worker is not None:
        work(options.worker)
        return 0
    from operator_coverage import measure_all
    from operator_samples.choice import all_targets

    with tempfile.TemporaryDirectory() as temporary:
        if options.coverage:
            coverage = json.loads(options.coverage.read_text("utf-8"))
        else:
            coverage = measure_all([target for targets in all_targets().values() for target in targets], temporary)
        todo = entries(coverage, options.only)
        done = scan(todo, options.calls, options.folder or Path(temporary), options.seconds)
    text = page(done, todo)
    print(text)
    if options.record:
        options.record.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
