"""The supervisor of the launch scripts, with launches that only tell how they end; the ranks that a recipe can use."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

from mindformers_core import supervised
from mindformers_core.commands.command_line import main
from mindformers_core.hangs import board, watcher
from mindformers_core.mesh import init_device_mesh
from mindformers_core.recipe.fitting import fitting_ranks
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import Checkpoint, batch_plan, mesh_shape
from mindformers_core.trainer.leaving import Leaving

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))

import launch  # noqa: E402
import supervisor  # noqa: E402
from machines import SILENT, Machines, end_of_job, free_machines, is_awaited  # noqa: E402

RECIPE = str(ROOT / "configs" / "llama_tiny_cpu.yaml")
TRAIN = [*supervisor.TRAIN, "--config", RECIPE, "parallelism.tensor_parallel=1", "parallelism.data_parallel_shard=-1"]
KILLED = 137
RUNS = {"run": 2}


def end(code, step=7, done=3, error="", run=0):
    """How a launch ends: its exit code; what a process of it tells."""
    return {"code": code, "steps": (step, done, run), "error": error}


class Starts(supervisor.Supervisor):
    """A supervisor whose launches end as a list says, which keeps their words."""

    def __init__(self, folder, ends, command=TRAIN, machine=0, machines=1, **settings):
        settings = supervisor.read_settings({"BACKOFF": "0", "RESTARTS": "5", **settings}, 4)
        super().__init__(4, folder, [], command, settings, Machines(folder / "machines", machine, machines))
        self.ends, self.words = iter(ends), []

    def _launch(self, words, told, ranks):
        how = next(self.ends)
        self.words.append((ranks, [word for word in words if word not in self.command]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(supervised.FOLDER, str(told[supervised.FOLDER]))
            if how["steps"] is not None:
                supervised.step_counter()[:] = how["steps"]
            if how["error"]:
                supervised.tell_end(how["error"], how["code"])
        return how["code"], False


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ([end(KILLED), end(KILLED), end(0)], 0, "exit code 137: restart 2 of 5"),
        ([end(KILLED)] * 6, KILLED, "the 5 restarts of RESTARTS are used up"),
        ([end(2, error="ValueError: bad sample")] * 2, 2, "the same error twice, at step 7: ValueError: bad sample"),
        ([end(2, 7, error="E: a"), end(70, 6, error="E: a"), end(2, 7, error="E: a")], 2, "at step 7: E: a"),
        ([*[end(2, step, error="E: a") for step in (7, 9, 7)], end(0)], 0, "restart 3"),  # it was passed since
        ([end(2, 7, error="E: a"), end(KILLED), end(2, 9, error="E: a"), end(0)], 0, "restart 3 of 5"),
        ([end(2, 1, 0, error="KeyError: 3")], 2, "it has ended before its first step was done"),
        ([end(2) | {"steps": None}], 2, "it has ended before its first step was done"),
        ([end(KILLED, 7), end(2, 8, 0, error="OSError: no disk"), end(0)], 0, "exit code 2: restart 2 of 5 in 0 s"),
        ([end(75), end(75), end(75), end(0)], 0, "restart 3"),  # as SIGTERM asks
        ([end(75, error="rank 1 issued all_reduce")] * 2, 75, "twice, at step 7: rank 1 issued all_reduce"),
        ([end(2, error="E: a"), end(139) | {"steps": None}, end(0)], 0, "restart 2"),  # what a start told goes with it
        ([end(139, error="")] * 2, 139, "the same error twice, at step 7: exit code 139"),
    ],
)  # fmt: skip
def test_when_a_job_is_started_again(tmp_path, capsys, ends, code, said):
    starts = Starts(tmp_path, ends)
    assert starts.run() == code
    assert len(starts.words) == len(ends)
    assert said in capsys.readouterr().err


def test_pauses_and_the_limit_in_time(tmp_path, monkeypatch):
    """A pause is twice as long, up to a minute, after each start that has done no step."""
    pauses, dones = [], (0, 0, 0, 5, 0)
    starts = Starts(tmp_path, [*(end(KILLED, done=done) for done in dones), end(0)], BACKOFF="10", TIME_LIMIT="90")
    monkeypatch.setattr(starts, "_wait", pauses.append)
    assert starts.run() == 0 and pauses == [20, 40, 60, 10, 20]
    told = supervisor.told_in(tmp_path)
    assert starts._reason_to_end(KILLED, told, 1, 89) is None
    assert starts._reason_to_end(KILLED, told, 1, 91) == "the 90 s of TIME_LIMIT are over"


def test_seconds_until_an_end_is_noticed():
    """Of a death 2 at most, and 5 after the deadline of a hang: how often all that look do so, and what they wait."""
    death = watcher._POLL + watcher._BY_ITSELF + launch.POLL_SECONDS + supervisor.POLL_SECONDS
    assert death <= 2 and death + board._STACK_TIME + watcher._ALL_REPORTED + watcher._BY_ITSELF <= 5
    assert int(launch.GRACE) > Checkpoint().grace + 5, "the end by the workers' own grace comes first"


def test_a_process_ends_after_its_grace(monkeypatch, one_rank):
    """Also where it hears SIGTERM again; one that has saved before leaves with the same code."""
    ends = []
    timer = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr("threading.Timer", lambda *given: ends.append(given) or timer)
    with Leaving(init_device_mesh((1,), ("dp",)), 0, 7) as leaving:
        assert not leaving.is_due(1, gathers=False)
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert leaving.is_due(2, gathers=False) and ends == [(7, os._exit, (75,))]
        with pytest.raises(SystemExit, match="75"):
            leaving.leave(2, "step_2")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_devices_are_among_those_that_the_job_was_given():
    assert supervisor.visible("", [0, 2]) == "0,2"
    assert supervisor.visible("4,5,6,7", [0, 1, 3]) == "4,5,7"
    assert supervisor.visible("5", [0, 3]) == "5", "workers that use none"


def test_machines_that_share_a_folder_tell_apart_what_their_processes_tell(tmp_path, monkeypatch):
    """Processes of one number on two hosts, under one supervisor; supervisors have folders of their own."""
    monkeypatch.setenv(supervised.FOLDER, str(tmp_path))
    for host, step in (("a", 3), ("b", 5)):
        monkeypatch.setattr(supervised, "gethostname", lambda host=host: host)
        supervised.step_counter()[:] = step, step, 0
        supervised.tell_end(f"E: {host}", 2)
    assert sorted(supervisor.told_in(tmp_path).ends) == [(3, "E: a", 2), (5, "E: b", 2)]
    assert Pair(tmp_path, 0, []).folder != Pair(tmp_path, 1, []).folder


class Pair(Starts):
    """One of two machines of 2 workers each."""

    def __init__(self, folder, machine, ends, *command, **settings):
        settings = {"MIN_WORKERS": "2", "REJOIN_TIMEOUT": "0", **settings}
        super().__init__(folder, ends, [*TRAIN, *command], machine, 2, **settings)


def silence(supervisor):
    """Let the sign of its machine be old."""
    path = supervisor.machines.folder / f"{supervisor.machines.own}.json"
    old = path.stat().st_mtime - SILENT
    os.utime(path, (old, old))


def sign(number, end=None, is_there=True):
    """What a machine tells."""
    return {"number": number, "end": end, "is_there": is_there}


@pytest.mark.parametrize(
    ("signs", "free", "ended", "awaited"),
    [
        ([sign(3), sign(3)], [0, 1], None, (False, True)),
        ([sign(3), sign(2)], [0], None, (True, True)),  # it still runs
        ([sign(3), sign(2, is_there=False)], [0], None, (False, True)),
        ([sign(3, is_there=False), sign(3)], [1], None, (False, False)),
        ([sign(3), sign(3, 2)], [0], (1, 2), (False, True)),
        ([sign(3), sign(3, 0, is_there=False)], [0], (1, 0), (False, True)),  # a while ago
        ([sign(3), sign(2, 2, is_there=False)], [0], None, (False, True)),  # of an earlier job
    ],
)
def test_what_signs_of_machines_mean(signs, free, ended, awaited):
    signs = dict(enumerate(signs))
    assert (free_machines(signs, 3), end_of_job(signs, 2)) == (free, ended)
    assert tuple(is_awaited(signs, own, 3) for own in (0, 1)) == awaited


def test_two_machines(tmp_path, capsys):
    """The second one takes part in what the first one starts; its sign is too old, then comes again, then is an end."""
    first, second = Pair(tmp_path, 0, [end(KILLED, **RUNS)] * 2), Pair(tmp_path, 1, [])
    second.machines.sign()
    start = first._next(0)
    assert (start["number"], start["machines"], start["workers"], start["words"]) == (1, [0, 1], 4, [])
    first._start(start)
    first.goes_on = True
    assert second._next(0) == start and not second.machines.members
    second.machines.leave(1)
    second.machines.sign()
    silence(second)
    alone = first._next(1)
    assert (alone["machines"], alone["workers"], alone["words"][-1]) == ([0], 2, "training.resume=auto")
    assert "parallelism.data_parallel_shard=2" in alone["words"]
    assert "goes on with 1 of 2 machines, which are [0]" in capsys.readouterr().err
    first.machines.begin(alone)
    silence(first)
    assert second._next(0) is None and second.machines.number == 2, "it waits"
    assert "machine 0 gives no sign in" in capsys.readouterr().err
    second.machines.sign()
    assert first._slots() == [0, 1, 2, 3], "those that run, and that wait"
    second.machines.leave(2)
    second.machines.sign(end=2)
    first.machines.leave(2)
    assert first._next(1) is None
    assert "machine 1 has ended the job with exit code 2" in capsys.readouterr().err
    second.machines.forget()
    assert Pair(tmp_path, 0, [], "parallelism.tensor_parallel=2", "parallelism.pipeline_parallel=2")._next(0) is None


def test_a_job_goes_on_in_its_run_folder_once_it_has_one(tmp_path):
    """Another run's checkpoints may lie there before. A user's own command stays as it is."""
    ends = [end(KILLED), end(KILLED, **RUNS), end(KILLED), end(0)]
    starts = Starts(tmp_path, ends)
    starts.run()
    assert starts.words == [(4, [])] * 2 + [(4, ["training.resume=auto"])] * 2
    starts = Starts(tmp_path, ends, ["train.py", "--fast"])
    starts.run()
    assert starts.words == [(4, [])] * 4


def test_a_job_goes_on_with_the_workers_that_there_are(tmp_path, monkeypatch, capsys):
    (tmp_path / "excluded").write_text("3\n")
    monkeypatch.setenv("EXCLUDE", str(tmp_path / "excluded"))
    starts = Starts(tmp_path, [end(KILLED, **RUNS), end(0)], MIN_WORKERS="2")
    starts.run()
    (tmp_path / "excluded").write_text("3 all")  # is told once, and changes nothing
    assert starts._slots() == starts._slots() == [0, 1, 2]
    assert capsys.readouterr().err.count("'all' is no process: give numbers from 0 to 3, or a file") == 1
    (tmp_path / "excluded").write_text("3\n")
    (ranks, first), (_, again) = starts.words
    assert ranks == 3 and {"parallelism.data_parallel_shard=3", "training.global_batch_size=8"} < {*first}
    assert again == [*first, "training.resume=auto"]
    assert Starts(tmp_path, [], REJOIN_TIMEOUT="0").run() == 1
    assert "3 of 4 workers are there, fewer than MIN_WORKERS=4" in capsys.readouterr().err
    monkeypatch.setenv("EXCLUDE", "0, 2,3")
    assert Starts(tmp_path, [], [*TRAIN, "parallelism.tensor_parallel=2"], MIN_WORKERS="1").run() == 1
    assert "no number of ranks from 1 to 1 fits: a copy of the model has 2" in capsys.readouterr().err


LAUNCH = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (open(sys.argv[1], "w").close(), sys.exit(75)))
print(os.environ["MINDFORMERS_MEMORY"], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGKILL, -9)])
def test_a_launch_hears_of_the_end_of_its_supervisor(tmp_path, number, code):
    """Whose memory goes with it, or, where it is killed, when there is another one."""
    words = [sys.executable, "-c", LAUNCH, "--command", tmp_path / "heard"]
    words = [sys.executable, supervisor.__file__, "--workers", "2", "--log_dir", tmp_path, "--launch", *words]
    with subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, env={**os.environ, "RESTARTS": "3"}) as process:
        memory = Path(process.stdout.readline().decode().strip())
        with supervisor.held_memory():
            assert (memory / ".lock").exists()
        process.send_signal(number)
        assert process.wait(20) == code
        assert process.stdout.read() == b""  # the launch has ended, and there is no other one
    assert (tmp_path / "heard").exists()
    assert number == signal.SIGKILL or not memory.exists()
    with supervisor.held_memory() as own:
        assert not memory.exists() and (Path(own) / ".lock").exists()
    assert not Path(own).exists()


class Samples:
    """A dataset with a sample that can't be read."""

    def __init__(self, *_):
        pass

    def __len__(self):
        return 1000

    def __getitem__(self, number):
        if Samples.read == 10:
            raise KeyError("a bad sample")
        Samples.read += 1
        return np.arange(16, dtype=np.int32), np.arange(16, dtype=np.int32)


def test_what_a_job_tells(tmp_path, monkeypatch):
    """Its run, its steps, and the error that ends it, with the step: of samples 8 to 11."""
    monkeypatch.setenv(supervised.FOLDER, str(tmp_path))
    monkeypatch.setattr(Samples, "read", 0, raising=False)
    small = "model.hidden_size=16", "model.num_hidden_layers=1", "monitor.plot=false", "train_dataset.seq_length=16"
    alone = "parallelism.data_parallel_shard=1", "parallelism.tensor_parallel=1", "training.local_batch_size=4"
    given = f"training.output_dir={tmp_path}/run", "training.global_batch_size=4"
    factory = f"train_dataset.factory={__name__}:Samples"
    assert main(["train", "--config", RECIPE, *small, *alone, *given, factory]) == 2
    told = supervisor.told_in(tmp_path)
    assert told.run == 1
    (step, error, code), *others = told.ends
    assert (told.step, told.done, step, code, others) == (3, 2, 3, 2, []) and "'a bad sample'" in error


@pytest.mark.parametrize(
    ("name", "value"),
    [("RESTARTS", "-1"), ("BACKOFF", "soon"), ("MIN_WORKERS", "5"), ("EXCLUDE", "1, x3"), ("EXCLUDE", "4")],
)
def test_a_variable_that_cannot_be_is_an_error(name, value):
    with pytest.raises(ValueError, match=f"^{name}="):
        supervisor.read_settings({name: value}, 4)


@pytest.mark.parametrize("seed", range(40))
def test_the_ranks_that_a_recipe_can_use(tmp_path, seed):
    """The most that there are, with the model cut as before, and the samples of a step as before."""
    rng = random.Random(seed)
    replicate, shard, tp, pp, cp = (rng.choice(sizes) for sizes in ((1, 2, 3), (1, 2, 4), (1, 2), (1, 2), (1, 2)))
    sections = yaml.safe_load(Path(RECIPE).read_text())
    sections["parallelism"] = {
        "data_parallel_replicate": replicate, "data_parallel_shard": rng.choice((shard, -1)), "tensor_parallel": tp,
        "pipeline_parallel": pp, "context_parallel": cp, "zero_level": rng.choice((0, 1, 3)) if shard > 1 else 0,
    }  # fmt: skip
    sections["training"] = {"local_batch_size": 4} | rng.choice(({}, {"gradient_accumulation_steps": 3}))
    copy = tp * pp * cp
    path, whole = tmp_path / "recipe.yaml", replicate * shard * copy
    path.write_text(json.dumps(sections))
    before, available = load_recipe(path), rng.randint(1, whole)
    if available < copy:
        with pytest.raises(ValueError, match=f"no number of ranks from 1 to {available} fits"):
            fitting_ranks(path, [], whole, available)
        return
    ranks, overrides = fitting_ranks(path, [], whole, available)
    after = load_recipe(path, overrides)
    assert available - copy < ranks <= available
    assert mesh_shape(after, ranks) == (pp, ranks // copy, cp, tp)
    plans = [batch_plan(recipe, mesh_shape(recipe, size)[1]) for recipe, size in ((before, whole), (after, ranks))]
    assert plans[0].samples == plans[1].samples and plans[1].ranks == ranks // copy
