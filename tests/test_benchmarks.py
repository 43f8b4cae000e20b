"""The benchmarks' harness: what it makes of times, and what it writes. Nothing is launched or timed in earnest."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import harness
from memory_watch import MemoryWatch, total
from support.launch import Launched

BENCHMARKS = Path(harness.__file__).parent


def report(**walls):
    """What one rank writes: wall seconds by variant, half of them CPU; all compared to `base`."""
    return [{"name": n, "base": "base", "wall": w, "cpu": [t / 2 for t in w]} for n, w in walls.items()]


def test_a_repeat_takes_as_long_as_its_slowest_rank_and_the_cpu_time_of_all_that_ran():
    """Of two ranks; rank 1 sits the base case out. Records and the table hold medians and their ratios."""
    first, second = report(base=[2.0, 4.0, 3.0], both=[1.0, 5.0, 5.0]), report(base=[], both=[8.0, 1.0, 2.0])
    results = harness._merged([first, second])
    base, both = results
    assert (base.wall, both.wall) == ((2.0, 4.0, 3.0), (8.0, 5.0, 5.0))
    assert (base.cpu, both.cpu) == ((1.0, 2.0, 1.5), (4.5, 3.0, 3.5))
    assert harness._records(results) == [
        {"name": "base", "ratio": 1.0, "median_ms": 3000.0, "repeats": 3},
        {"name": "both", "ratio": 1.6667, "median_ms": 5000.0, "repeats": 3},
    ]
    lines = harness._table(results)
    assert len({len(line) for line in lines}) == 1
    cells = [cell.strip() for cell in lines[3].strip("|").split("|")]
    assert cells == ["both", "1.67", "5000", "5000 – 8000", "3500", "3"]


def test_timing_runs_what_was_prepared_behind_the_barrier_and_a_rank_that_sits_out_only_waits():
    events = []
    prepare, run = lambda: events.append("prepare") or ("x",), lambda x: events.append(f"run {x}")
    variant, barrier = harness.Variant("a", "a", run, prepare, ranks=(0,), calls=4), lambda: events.append("barrier")
    wall, cpu = harness._timed(variant, 0, barrier)
    assert events == ["prepare", "barrier", "run x"] and 0 <= wall < 1 and 0 <= cpu < 1
    assert harness._timed(variant, 1, barrier) is None and events[3:] == ["barrier"]


def test_the_readme_keeps_all_but_the_figures(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- figures of x.py -->\nold\n<!-- end of figures -->\nafter\n")
    harness._record(readme, "x.py", "new")
    assert readme.read_text() == "before\n<!-- figures of x.py -->\nnew\n<!-- end of figures -->\nafter\n"
    with pytest.raises(ValueError, match="figures of y.py"):
        harness._record(readme, "y.py", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize("given", [["--repeats", "4"], ["--json", "no/such/folder/figures.json"]])
def test_arguments_that_would_waste_a_run_are_refused_at_once(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x.py", *given])
    with pytest.raises(SystemExit):
        harness._options("title")
    assert given[0] in capsys.readouterr().err.splitlines()[-1]


def test_a_failed_launch_is_reported_with_the_ranks_logs(monkeypatch, capsys):
    lost = Launched(1, {0: "all is well", 1: "ValueError: bad"}, 0.5)
    monkeypatch.setattr(harness, "run_ranks", lambda *arguments, **options: lost)
    monkeypatch.setattr(sys, "argv", ["x.py"])
    assert harness.run_benchmark("x.py", 2, list, "title") == 1
    assert "ValueError: bad" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """As if this process had started no other: launches of ranks run beside the tests, and they count."""
    monkeypatch.setattr("memory_watch.psutil.Process.children", lambda *_, **__: [])


def test_too_much_memory_ends_the_ranks(monkeypatch, capsys):
    def ranks(*arguments, stop, **options):
        assert stop.wait(10)
        return Launched(None, {}, 0.5)

    monkeypatch.setattr(harness, "run_ranks", ranks)
    monkeypatch.setattr(harness, "MemoryWatch", lambda: MemoryWatch(limit=10**7, interval=0.01))
    monkeypatch.setattr(sys, "argv", ["x.py"])
    assert harness.run_benchmark("x.py", 2, list, "title") == 1
    assert re.match(r"ended: x.py took \d+\.\d+ GB; the limit", capsys.readouterr().err)


def test_memory_is_that_of_all_processes_with_shared_files_once():
    first, second = ("VmPeak:\t 900 kB\nVmHWM:\t {} kB\nRssFile:\t {} kB\n".format(*of) for of in ((50, 10), (70, 30)))
    assert total([first, second, "Name:\tended\n"]) == 1024 * (40 + 40 + 30)


def test_the_figures_of_a_run_are_printed_and_written(monkeypatch, tmp_path, capsys):
    def ranks(world_size, script, repeats, folder, **options):
        for rank in range(world_size):
            (Path(folder) / f"{rank}.json").write_text(json.dumps(report(base=[1.0] * repeats, a=[0.5] * repeats)))
        return Launched(0, {}, 0.5)

    monkeypatch.setattr(harness, "run_ranks", ranks)
    monkeypatch.setattr(sys, "argv", ["x.py", "--json", str(tmp_path / "out.json"), "--repeats", "5"])
    for kept in (True, False):
        told = lambda results, kept=kept: ([f"remark {results['a'].median}"], kept)  # noqa: E731
        assert harness.run_benchmark("x.py", 2, list, "title", told) == int(not kept)
        assert re.search(r"remark 0\.5\n- peak memory: \d+\.\d+ GB, all.* kept\n$", capsys.readouterr().out)
    assert [entry["ratio"] for entry in json.loads((tmp_path / "out.json").read_text())] == [1.0, 0.5]


def test_every_benchmark_has_its_place_in_the_readme():
    scripts = [path.name for path in BENCHMARKS.glob("*.py") if "run_benchmark(__file__" in path.read_text()]
    assert scripts and all(f"<!-- figures of {name} -->" in (BENCHMARKS / "README.md").read_text() for name in scripts)


def operator_results(**microseconds):
    """Results by name: models that take a second each, and an operator's medians."""
    kinds = ("eager", *(f"{maker}/{mode}" for maker in ("handwritten", "generated") for mode in ("pynative", "jit")))
    models = [f"{model}/{kind}" for model in ("mlp", "transformer") for kind in kinds]
    medians = dict.fromkeys(models, 1.0) | {f"op/matmul/{name}": value / 1e6 for name, value in microseconds.items()}
    return {name: harness.Result(name, name, (median,), (median,)) for name, median in medians.items()}


@pytest.mark.parametrize(("generated", "kept"), [(1.03, True), (1.04, False)])
def test_a_program_that_is_slower_than_by_hand_fails_the_benchmark(generated, kept):
    benchmark = importlib.import_module("tensor_parallel")
    medians = operator_results(plain=28, cached=28, plain_first=900, first=900, first_marked=900)
    medians["mlp/generated/jit"] = harness.Result("", "", (generated,), (generated,))
    shown, all_kept = benchmark.remarks(medians)
    assert all_kept == kept
    assert f"mlp/generated/jit: {generated:.3f} of mlp/handwritten/jit; limit 1.03" in "\n".join(shown)


def recompute_memory(**resident):
    """What `memory_of` gives for all variants: peaks as given by variant, in PyNative; what is kept is predicted."""
    benchmark = importlib.import_module("recompute_memory")
    found = {(name, mode): {"resident": 100.0 if name == "none" else 40.0} for name, mode in benchmark.SETTINGS}
    for variant, megabytes in (dict.fromkeys(("none", "selective", "budget_0.5", "full"), 40.0) | resident).items():
        found[variant, "pynative"] = {"resident": megabytes, "kept": megabytes, "predicted": megabytes}
    return found


def test_memory_that_does_not_fall_fails_the_benchmark():
    benchmark = importlib.import_module("recompute")
    shown, all_kept = benchmark.memory_remarks(recompute_memory(none=100.0))
    assert all_kept and any("- full/jit: peak resident memory 40 MB over that before, 0.4" in line for line in shown)
    shown, all_kept = benchmark.memory_remarks(recompute_memory(none=100.0, full=66.0))
    assert not all_kept and any("0.660 of none/pynative; limit 0.65, EXCEEDED" in line for line in shown)
    assert benchmark.memory_remarks(recompute_memory(none=100.0) | {("full", "jit"): {"resident": 56.0}})[1] is False


def test_memory_that_was_not_foretold_fails_the_benchmark():
    benchmark, memory = importlib.import_module("recompute"), recompute_memory(none=100.0)
    memory["full", "pynative"]["predicted"] = 41.0
    shown, all_kept = benchmark.memory_remarks(memory)
    assert not all_kept and any("predicted 41.0 MB, off by 0.0244; limit 0.02, EXCEEDED" in line for line in shown)
