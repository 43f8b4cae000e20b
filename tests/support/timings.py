"""What takes the time of a pytest run, printed at its end: tests and rank cases, launches, CPU seconds, memory."""

import resource
import time
from collections import Counter
from dataclasses import dataclass

import pytest

_TIMES = pytest.StashKey[dict]()
_LAUNCHES = pytest.StashKey[dict]()
_START = pytest.StashKey[float]()  # CPU seconds of the process when a test began
CASE, _CPU = "in its launch", "CPU seconds"  # properties of a report


@dataclass(frozen=True)
class Timed:
    """Seconds by the clock and by the CPU that a test took with its fixtures; a rank case, in its launch."""

    seconds: float
    cpu_seconds: float
    name: str


def pytest_addoption(parser):
    """`--slowest N`: how many tests the table at the end has; 25 by default, 0 for none."""
    parser.addoption("--slowest", type=int, default=25, metavar="N", help="print the N slowest tests and rank cases")


def pytest_configure(config):
    """Begin with nothing timed."""
    config.stash[_TIMES], config.stash[_LAUNCHES] = {}, {}
    config.pluginmanager.register(_Collector(config.stash[_TIMES]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Note the CPU time at which a test begins."""
    item.stash[_START] = time.process_time()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    """Let a test's last report tell its CPU time: reports may come from another process."""
    if call.when == "teardown":
        item.user_properties.append((_CPU, time.process_time() - item.stash.get(_START, time.process_time())))


class _Collector:
    """Adds the seconds of a test's reports up. What counts of a case is its time in the launch, not the wait for it."""

    def __init__(self, times):
        self.times = times

    def pytest_runtest_logreport(self, report):
        known, told = self.times.get(report.nodeid, Timed(0.0, 0.0, report.nodeid)), dict(report.user_properties)
        seconds, cpu_seconds = told.get(CASE, (known.seconds + report.duration, told.get(_CPU, 0.0)))
        self.times[report.nodeid] = Timed(seconds, cpu_seconds, report.nodeid)


def remember_launches(config, launches):
    """Keep what launches by world size ended with: each a dict of `CaseResult`, and the seconds beside the cases."""
    config.stash[_LAUNCHES].update(launches)


def pytest_terminal_summary(terminalreporter, config):
    """The slowest tests and rank cases together, then the dearest files, then each launch, then the whole."""
    wanted, times = config.getoption("slowest"), config.stash[_TIMES].values()
    if not wanted or not times:
        return
    terminalreporter.section(f"slowest {min(wanted, len(times))} of {len(times)}: seconds, CPU seconds (of all ranks)")
    for timed in sorted(times, key=lambda timed: -timed.seconds)[:wanted]:
        terminalreporter.write_line(f"{timed.seconds:8.2f} {timed.cpu_seconds:8.2f}  {timed.name}")
    files = Counter()
    for timed in times:
        files[_file_of(timed.name)] += timed.cpu_seconds
    dearest = [f"{name} {seconds:.0f}" for name, seconds in files.most_common(wanted)]
    terminalreporter.write_line(f"CPU seconds of files: {', '.join(dearest)}")
    for size, (results, starting) in config.stash[_LAUNCHES].items():
        terminalreporter.write_line(_launch_line(size, list(results.values()), starting))
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu_seconds, child_seconds = (usage.ru_utime + usage.ru_stime for usage in (own, children))
    terminalreporter.write_line(
        f"pytest: {cpu_seconds:.0f} CPU s, peak memory: {own.ru_maxrss / 2**20:.1f} GiB; "
        f"processes that it started and waited for: {child_seconds:.0f} CPU s"
    )


def _file_of(name):
    """The file of a test; of a rank case its number of ranks and its module."""
    return name.partition("::test_case[")[2].partition("::")[0] or name.partition("::")[0]


def _launch_line(size, results, starting):
    seconds, cpu_seconds = (sum(getattr(result, name) for result in results) for name in ("seconds", "cpu_seconds"))
    peak = max((result.peak_memory for result in results), default=0)
    return (
        f"{len(results)} cases on {size} ranks: {seconds:.0f} s, {cpu_seconds:.0f} CPU s; to start and end launches: "
        f"{starting:.0f} s; peak memory of a rank: {peak / 2**30:.1f} GiB"
    )
