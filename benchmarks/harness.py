"""Fair timing of variants of one computation, on ranks that the benchmark starts itself.

A benchmark is a script that ends in `sys.exit(run_benchmark(…))`. Started by hand it launches its own ranks under
msrun, which run the same script again; rank r is pinned, with all its threads, to core r modulo the number of cores,
since a single process would otherwise use all cores and the comparison would lie. Every repeat runs all variants in
turn, so that whatever else the machine does hits all alike; medians are compared, within one run only.
"""

import argparse
import gc
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import textwrap
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import mindspore as ms
from memory_watch import GB, MEMORY_LIMIT, MemoryWatch
from mindspore import ops

from mindformers_core.communication import init_distributed

# The tests' launcher serves here too. It is taken by its path, since nothing else of the tests should be importable.
_LAUNCHER = Path(__file__).resolve().parent.parent / "tests" / "support" / "launch.py"
_spec = spec_from_file_location("tests_launch", _LAUNCHER)
_launcher = module_from_spec(_spec)
_spec.loader.exec_module(_launcher)
run_ranks = _launcher.run_ranks

MIN_REPEATS = 5
WARM_UP = 2  # rounds that are not timed: they compile, fill caches, and start threads


@dataclass(frozen=True)
class Variant:
    """One way to compute something.

    Attributes:
        name: as in the table and the JSON file.
        base: name of the variant that it is compared to; its own for a base case.
        run: what is timed; called on every rank in `ranks` with what `prepare` returned as its arguments. Where it
            returns a float, these seconds are taken: of a part of what it does.
        prepare: called before every `run`, untimed. Default: no arguments.
        ranks: the ranks that run it, while the others wait at a barrier; None for all.
        calls: how often one `run` does what is measured; its time is divided by that.
    """

    name: str
    base: str
    run: object
    prepare: object = tuple
    ranks: tuple | None = None
    calls: int = 1


@dataclass(frozen=True)
class Result:
    """Seconds that one call of a variant took, by repeat: `wall` on the slowest rank, `cpu` of all its ranks."""

    name: str
    base: str
    wall: tuple
    cpu: tuple

    @property
    def median(self):
        """Median wall time."""
        return statistics.median(self.wall)


def run_benchmark(script, world_size, make_variants, title, remarks=None, timeout=900):
    """Time all variants on `world_size` ranks, and show the figures. Called by the script, by hand and on every rank.

    Args:
        script: `__file__` of the benchmark.
        world_size: number of ranks.
        make_variants: called on every rank, when communication is initialised: returns the variants, in one order
            on all ranks, and raises where they don't agree in what they compute.
        title: what the figures are about, in a line.
        remarks: results by name -> `(lines to print below the table, whether all limits are kept)`.
        timeout: seconds until the ranks are killed.

    Returns:
        The exit code: 0, or 1 where a limit is exceeded, that of memory included, or a rank failed, whose log is then
        shown. Both end the ranks within seconds.
    """
    if "MS_ROLE" in os.environ:
        _serve_or_end(make_variants, int(sys.argv[1]), Path(sys.argv[2]))
        return 0
    options = _options(title)
    with MemoryWatch() as watch:
        outcome = _launch(script, world_size, options.repeats, timeout, watch)
        if isinstance(outcome, str):
            print(outcome, file=sys.stderr)
            return 1
        more, all_kept = ([], True) if remarks is None else remarks({result.name: result for result in outcome})
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    kept = watch.peak <= MEMORY_LIMIT
    more.append(
        f"- peak memory: {watch.peak / GB:.2f} GB, all processes together; "
        f"limit {MEMORY_LIMIT / GB:g} GB, {'kept' if kept else 'EXCEEDED'}"
    )
    all_kept = all_kept and kept
    heading = textwrap.wrap("; ".join([title, ranks, *_machine()]), 120)
    more = [part for line in more for part in textwrap.wrap(line, 120, subsequent_indent="  ")]
    text = "\n".join([*heading, "", *_table(outcome), "", *more])
    print(text)
    if options.json is not None:
        _write(options.json, json.dumps(_records(outcome), indent=1) + "\n")
    if options.readme:
        _record(Path(__file__).with_name("README.md"), Path(script).name, text)
    return 0 if all_kept else 1


def ratio_remarks(results, ratios):
    """`(lines, whether all limits are kept)` of medians over others.

    Args:
        results: by name.
        ratios: triples of names, and the limit of the first one's median over the second one's, or None.
    """
    lines, all_kept = [], True
    for name, base, limit in ratios:
        ratio = results[name].median / results[base].median
        shown = "" if limit is None else f"; {verdict(ratio, limit)}"
        lines.append(f"- {name}: {ratio:.3f} of {base}{shown}")
        all_kept = all_kept and (limit is None or ratio <= limit)
    return lines, all_kept


def repeated(function, calls):
    """A function that calls another one so many times."""

    def run():
        for _ in range(calls):
            function()

    return run


def verdict(ratio, limit):
    """Whether a limit is kept, in words."""
    return f"limit {limit:g}, {'kept' if ratio <= limit else 'EXCEEDED'}"


def _options(title):
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, as a JSON list")
    parser.add_argument("--repeats", type=int, default=9, help=f"timed rounds, at least {MIN_REPEATS} (default: 9)")
    parser.add_argument("--readme", action="store_true", help="put the figures into benchmarks/README.md")
    options = parser.parse_args()
    if options.repeats < MIN_REPEATS:
        parser.error(f"--repeats {options.repeats}: a median needs at least {MIN_REPEATS}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.absolute().parent}")
    return options


def _launch(script, world_size, repeats, timeout, watch):
    """The results of all ranks together, or the text of what went wrong."""
    with tempfile.TemporaryDirectory(prefix="benchmark_") as folder:
        one_thread = {"OMP_NUM_THREADS": "1"}  # of a kernel: more would only fight for the rank's one core
        script = Path(script).resolve()
        launched = run_ranks(world_size, script, repeats, folder, timeout=timeout, env=one_thread, stop=watch.exceeded)
        if watch.exceeded.is_set():
            return f"ended: {script.name} took {watch.peak / GB:.2f} GB; the limit is {MEMORY_LIMIT / GB:g} GB"
        reports = [Path(folder) / f"{rank}.json" for rank in range(world_size)]
        silent = [rank for rank, report in enumerate(reports) if not report.exists()]
        if silent:
            said = "\n".join(f"--- rank {rank}:\n{launched.tail(rank)}" for rank in silent)
            return f"no figures from ranks {silent} (msrun exit code {launched.exit_code}); their logs end:\n{said}"
        return _merged([json.loads(report.read_text()) for report in reports])


def _merged(reports):
    """One `Result` a variant, from what every rank wrote: a repeat takes as long as its slowest rank."""
    results = []
    for of_ranks in zip(*reports, strict=True):
        names = {(entry["name"], entry["base"]) for entry in of_ranks}
        assert len(names) == 1, f"ranks made their variants in different orders: {names}"
        ran = [entry for entry in of_ranks if entry["wall"]]
        walls, cpus = (zip(*(entry[key] for entry in ran), strict=True) for key in ("wall", "cpu"))
        results.append(Result(*names.pop(), tuple(map(max, walls)), tuple(map(sum, cpus))))
    return results


def _serve_or_end(make_variants, repeats, folder):
    """`_serve`, or end at once: MindSpore's own end waits for the other ranks, and msrun for this one."""
    try:
        _serve(make_variants, repeats, folder)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _serve(make_variants, repeats, folder):
    """Be one rank: time all variants, and leave the times in the folder."""
    cores = sorted(os.sched_getaffinity(0))
    world = init_distributed(timeout=300)
    _pin(cores[world.rank % len(cores)])
    variants = make_variants()
    barrier = _barrier(world.size)
    for _ in range(WARM_UP):
        for variant in variants:
            _timed(variant, world.rank, barrier)
    _pin(cores[world.rank % len(cores)])  # threads that came with the warm-up, too
    times = [[_timed(variant, world.rank, barrier) for variant in variants] for _ in range(repeats)]
    report = []
    for variant, repeated in zip(variants, zip(*times)):
        ran = [pair for pair in repeated if pair is not None]
        wall, cpu = ([pair[index] for pair in ran] for index in (0, 1))
        report.append({"name": variant.name, "base": variant.base, "wall": wall, "cpu": cpu})
    _write(folder / f"{world.rank}.json", json.dumps(report))


def _timed(variant, rank, barrier):
    """`(wall, CPU)` seconds of one call, or None on a rank that sits this variant out."""
    runs_here = variant.ranks is None or rank in variant.ranks
    arguments = variant.prepare() if runs_here else ()
    gc.collect()
    barrier()
    if not runs_here:
        return None
    cpu, wall = time.process_time(), time.perf_counter()
    of_part = variant.run(*arguments)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    wall = of_part if isinstance(of_part, float) else wall
    return wall / variant.calls, cpu / variant.calls


def _pin(core):
    """Bind every thread of this process to one core."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(int(thread), {core})


def _barrier(size):
    """A function that returns when all ranks have called it."""
    if size == 1:  # MindSpore has no communication then
        return lambda: None
    all_reduce, token = ops.AllReduce(), ms.Tensor([1.0], ms.float32)
    return lambda: all_reduce(token).asnumpy()


def _machine():
    """The machine, the versions, the day."""
    cpu_info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.+)$", cpu_info, re.MULTILINE)
    cores = len(os.sched_getaffinity(0))
    versions = f"Python {platform.python_version()}, MindSpore {version('mindspore')}, NumPy {version('numpy')}"
    return [f"{cores} cores of {model.group(1) if model else platform.machine()}", versions, date.today().isoformat()]


def _ratio(result, results):
    """Its median over that of its base case."""
    return result.median / next(other for other in results if other.name == result.base).median


def _records(results):
    return [
        {
            "name": result.name,
            "ratio": round(_ratio(result, results), 4),
            "median_ms": round(result.median * 1e3, 6),
            "repeats": len(result.wall),
        }
        for result in results
    ]


def _table(results):
    """Markdown that reads well as it stands: columns are aligned."""
    rows = [("name", "ratio", "median ms", "fastest – slowest ms", "CPU ms, all ranks", "repeats")]
    for result in results:
        span = f"{min(result.wall) * 1e3:.4g} – {max(result.wall) * 1e3:.4g}"
        cpu = f"{statistics.median(result.cpu) * 1e3:.4g}"
        ratio, median = f"{_ratio(result, results):.2f}", f"{result.median * 1e3:.4g}"
        rows.append((result.name, ratio, median, span, cpu, str(len(result.wall))))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        lines.append(f"| {' | '.join(cells)} |")
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return [lines[0], f"| {' | '.join(rule)} |", *lines[1:]]


def _record(readme, name, text):
    """Put the figures into the README, between this benchmark's marks.

    Raises:
        ValueError: the README has no such marks.
    """
    start, end = f"<!-- figures of {name} -->", "<!-- end of figures -->"
    before, found, rest = readme.read_text().partition(start)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{readme} has no lines '{start}' and '{end}' to put the figures between")
    _write(readme, f"{before}{start}\n{text}\n{end}{after}")


def _write(path, text):
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
