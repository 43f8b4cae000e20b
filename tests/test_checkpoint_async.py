"""Saving beside training: the snapshot is that of its moment; a busy, a failing, an orphaned writer; nothing leaks."""

import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support.checkpoint_states import State, on_threads, state_on, tensors
from test_training_loop import ONE_RANK, SMALL

from mindformers_core.checkpoint.background import BackgroundSave
from mindformers_core.checkpoint.folders import find_checkpoint, step_folder
from mindformers_core.checkpoint.load import check_checksums, open_checkpoint
from mindformers_core.checkpoint.parts import Ranks
from mindformers_core.checkpoint.save import SaveError
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.trainer import trainer

pytestmark = pytest.mark.long

ORPHAN = """
import sys
import numpy as np
from mindformers_core.checkpoint.background import BackgroundSave
from mindformers_core.checkpoint.parts import Part, Ranks
box = ((0, 4),)
part = Part("model", "a", "float32", (4,), box)
def gather(value):  # a rank 0 that never begins
    return {0: [["model", "b", "float32", (4,), box]] if isinstance(value, list) and value and value[0][0] == "model"
            else value, 1: value}
saving = BackgroundSave(Ranks(1, gather))
saving.start(sys.argv[1], [part], lambda part: np.zeros(4, np.float32), {}, (0, 0))
saving.await_copies()
print(saving._process.pid, flush=True)
sys.stdin.read()
"""


def is_alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descriptors():
    """Open descriptors of this process that are shared memory."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue
    return sum("memfd:checkpoint" in target for target in found)


def saved_beside(state, folders, work):
    """Call `work(saving, start, ranks)` on all ranks; `start(index)` begins to save into a folder of `folders`."""

    def on_rank(ranks):
        saving = BackgroundSave(ranks)

        def start(index):
            saving.start(folders[index], state.parts(ranks.rank), state.value, {"state.json": b"{}"}, (0, 0))

        try:
            return work(saving, start, ranks)
        finally:
            process = saving._process
            saving.close()
            assert process is None or not is_alive(process.pid)

    found = on_threads(state.ranks, on_rank)
    assert descriptors() == 0
    return found


@pytest.mark.parametrize("name", ["one", "dp_tp", "pp_zero_tp"])
def test_a_snapshot_is_that_of_its_moment(tmp_path, name):
    """Two saves by the same processes' memory; the tensors change as soon as they are copied."""
    state, folders = state_on(tensors(1), name), [step_folder(tmp_path, step) for step in (1, 2)]
    saved = [state_on({key: (dtype, array.copy()) for key, (dtype, array) in state.tensors.items()}, name)]

    def work(saving, start, ranks):
        for index in range(2):
            assert saving.settle(waits=True)
            start(index)
            ranks.gather(0)
            if ranks.rank == 0:
                for (group, _), (dtype, array) in state.tensors.items():
                    array += group == "model" and dtype != "bool"
            saving.await_copies()
            ranks.gather(0)
            if ranks.rank == 0:
                for (group, _), (dtype, array) in state.tensors.items():
                    array += group != "model" and dtype != "bool"
                if index == 0:
                    saved.append(
                        state_on({key: (dtype, array.copy()) for key, (dtype, array) in state.tensors.items()}, name)
                    )
            ranks.gather(0)
        assert saving.settle()

    saved_beside(state, folders, work)
    for folder, expected in zip(folders, saved, strict=True):
        expected.check(folder)
        assert sorted(os.listdir(folder)) == sorted(
            ["checksums.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "optimizer",
             "state.json"]
        )  # fmt: skip
        check_checksums(open_checkpoint(folder))
    assert find_checkpoint(str(tmp_path)) == folders[1]


def test_files_are_those_of_a_plain_save(tmp_path):
    state, folders = state_on(tensors(), "zero_tp"), [str(tmp_path / "beside/step_1")]
    saved_beside(state, folders, lambda saving, start, ranks: (start(0), saving.settle()))
    state.save(str(tmp_path / "plain/step_1"), {"state.json": b"{}"})
    for path in (tmp_path / "plain").rglob("*"):
        if path.is_file():
            assert (tmp_path / "beside" / path.relative_to(tmp_path / "plain")).read_bytes() == path.read_bytes()


def test_a_busy_writer_is_seen_by_all_ranks(tmp_path):
    state, folders = state_on(tensors(), "dp_tp"), [step_folder(tmp_path, 1)]

    def work(saving, start, ranks):
        start(0)
        saving.await_copies()
        if ranks.rank == 2:
            os.kill(saving._process.pid, signal.SIGSTOP)
        ranks.gather(0)
        assert not saving.settle(waits=False)
        assert not os.path.exists(folders[0])
        if ranks.rank == 2:
            writer, own = (os.getpriority(os.PRIO_PROCESS, process) for process in (saving._process.pid, 0))
            assert writer == min(19, own + 15)
            os.kill(saving._process.pid, signal.SIGCONT)
        assert saving.settle()

    saved_beside(state, folders, work)
    state.check(folders[0])


@pytest.mark.parametrize("killed", [0, 3])
def test_the_end_of_a_writer_is_an_error_on_all_ranks(tmp_path, killed):
    state, folders = state_on(tensors(), "dp_tp"), [step_folder(tmp_path, step) for step in (1, 2)]

    def work(saving, start, ranks):
        start(0)
        saving.await_copies()
        if ranks.rank == killed:
            saving._process.kill()
        error = rf"^rank {killed}: the checkpoint .*step_1 can't be saved: the writer ended with code -9$"
        with pytest.raises(SaveError, match=error):
            saving.settle()
        ranks.gather(0)
        assert not os.path.exists(folders[0])
        start(1)
        saving.settle()

    saved_beside(state, folders, work)
    assert os.listdir(tmp_path / "checkpoint") == ["step_2"]
    state.check(folders[1])


def test_errors_of_a_writer_arrive_in_its_words(tmp_path):
    (tmp_path / "file").touch()
    state, folders = state_on(tensors(), "dp_tp"), [str(tmp_path / "file/step_1")]

    def work(saving, start, ranks):
        start(0)
        error = r"^rank 0: the checkpoint .*file/step_1 can't be saved: \[Errno (17|20)\] [^\n]*$"
        with pytest.raises(SaveError, match=error):
            saving.settle()

    saved_beside(state, folders, work)


def test_a_rank_without_memory_is_an_error_on_all_ranks(tmp_path):
    state, folders = state_on(tensors(), "dp_tp"), [step_folder(tmp_path, 1)]

    def fail(*arguments):
        raise OSError(12, "Cannot allocate memory")

    def work(saving, start, ranks):
        if ranks.rank == 1:
            saving._write = fail
        start(0)
        with pytest.raises(SaveError, match=r"^rank 1: the checkpoint .*step_1 can't be saved: \[Errno 12\]"):
            saving.settle()

    saved_beside(state, folders, work)
    assert not os.path.exists(folders[0])


def test_a_writer_ends_with_its_parent(tmp_path):
    """Rank 1 waits for a rank 0 that never begins; its parent is killed."""
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(tmp_path / "step_1")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        writer = int(parent.stdout.readline())
        time.sleep(0.5)
        assert is_alive(writer)
        parent.kill()
        for _ in range(100):
            if not is_alive(writer):
                break
            time.sleep(0.1)
        assert not is_alive(writer)


def test_memory_is_shared_and_kept(tmp_path):
    """The second snapshot needs no new memory."""
    state, folders = state_on(tensors(), "one"), [step_folder(tmp_path, step) for step in (1, 2)]

    def work(saving, start, ranks):
        start(0)
        first = saving._memory
        saving.settle()
        start(1)
        saving.await_copies()
        assert saving._memory is first and descriptors() == 3  # the snapshot, its mapping, the parts
        saving.settle()

    saved_beside(state, folders, work)
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["step_1", "step_2"]


def test_the_first_snapshot_has_its_pages_already(tmp_path):
    """Page faults of a save of 32 MiB after `reserve`; each 4 KiB of new memory would be one."""
    array, mesh = np.ones((8, 2**20), np.uint32), DeviceMesh((1,), ("dp",))
    state = State({("model", "a"): ("float32", array)}, {("model", "a"): [Layout.on(mesh, ((), ()))]})
    saving, parts = BackgroundSave(Ranks()), state.parts(0)
    saving.reserve(parts)
    saving._faulting.result()
    memory, count = saving._memory, resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    saving.start(step_folder(tmp_path, 1), parts, state.value, {}, (0, 0))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - count
    assert faults < 0.05 * array.nbytes / resource.getpagesize() and saving._memory is memory
    saving.settle()
    saving.close()
    state.check(step_folder(tmp_path, 1))


def test_memory_that_a_rank_does_not_get_is_asked_for_again(tmp_path):
    state, folder = state_on(tensors(), "dp_tp"), step_folder(tmp_path, 1)

    def fail(*arguments):
        raise OSError(12, "Cannot allocate memory")

    def work(saving, start, ranks):
        if ranks.rank == 1:
            saving._allocate = fail
        with pytest.raises(
            SaveError, match=r"async_save: a copy of the state can't be allocated: rank 1: \[Errno 12\]"
        ):
            saving.reserve(state.parts(ranks.rank))
        vars(saving).pop("_allocate", None)
        start(0)
        saving.settle()

    saved_beside(state, [folder], work)
    state.check(folder)


def job_of(folder, *overrides):
    """A job of three steps that saves after each, beside training."""
    options = (
        "training.steps=3", "checkpoint.enable_save=true", "checkpoint.save_interleaved_steps=1",
        "checkpoint.async_save=true", f"training.output_dir={folder / 'a'}", f"train_dataset.cache_dir={folder}",
    )  # fmt: skip
    return trainer.Trainer(load_recipe(ONE_RANK, [*SMALL, *options, *overrides]))


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_the_recipe_says_whether_a_busy_writer_is_waited_for(tmp_path, monkeypatch, capsys, when_busy):
    """A writer is busy until it is waited for; the checkpoint after the last step is saved in any case."""
    settle = BackgroundSave.settle
    asked = []

    def busy_unless_waited_for(saving, waits=True):
        asked.append(waits)
        return settle(saving) if waits or saving.folder is None else False

    monkeypatch.setattr(BackgroundSave, "settle", busy_unless_waited_for)
    job = job_of(tmp_path, f"checkpoint.when_busy={when_busy}")
    job.run()
    said = [line for line in capsys.readouterr().out.splitlines() if "is skipped" in line]
    if when_busy == "wait":
        assert asked == [True] * 4 and said == []
        assert sorted(os.listdir(tmp_path / "a/checkpoint")) == ["step_1", "step_2", "step_3"]
    else:
        assert asked == [False, False, True, True] and len(said) == 1
        assert "step_2 is skipped, since" in said[0] and "step_1 is still being written" in said[0]
        assert sorted(os.listdir(tmp_path / "a/checkpoint")) == ["step_1", "step_3"]
    for step in os.listdir(tmp_path / "a/checkpoint"):
        check_checksums(open_checkpoint(str(tmp_path / "a/checkpoint" / step)))
    assert descriptors() == 0


@pytest.mark.parametrize("on_error", ["end", "go_on"])
def test_errors_of_a_writer_arrive_at_the_next_save(tmp_path, monkeypatch, capsys, on_error):
    start = BackgroundSave.start

    def start_and_kill(saving, folder, *arguments):
        start(saving, folder, *arguments)
        saving.await_copies()
        if folder.endswith("step_1"):
            saving._process.kill()

    monkeypatch.setattr(BackgroundSave, "start", start_and_kill)
    job = job_of(tmp_path, f"checkpoint.on_error={on_error}")
    if on_error == "end":
        with pytest.raises(SaveError, match="step_1 can't be saved: the writer ended with code -9"):
            job.run()
        assert job.step == 2 and list(tmp_path.glob("a/checkpoint/*")) == []
    else:
        job.run()
        assert "step_1 can't be saved: the writer ended with code -9; training goes on" in capsys.readouterr().out
        assert sorted(os.listdir(tmp_path / "a/checkpoint")) == ["step_2", "step_3"]
    assert descriptors() == 0


def test_training_that_fails_ends_the_writer(tmp_path, monkeypatch):
    job, processes = job_of(tmp_path), []

    def fail(job, train_step=trainer.Trainer.train_step):
        if job.step == 1:
            job.checkpointer.await_copies()
            processes.append(job.checkpointer._background._process.pid)
            os.kill(processes[0], signal.SIGSTOP)
            raise RuntimeError("failed")
        return train_step(job)

    monkeypatch.setattr(trainer.Trainer, "train_step", fail)
    with pytest.raises(RuntimeError, match="failed"):
        job.run()
    assert not is_alive(*processes) and descriptors() == 0
