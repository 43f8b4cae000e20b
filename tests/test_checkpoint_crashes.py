"""The crash matrix of a save: at each call of the file layer a kill, ENOSPC, EIO, EACCES; the newest checkpoint stays.

A run has step_1 and step_2, and what a crash left of step_9. It saves step_3, or step_2 again, with keep_last=2.
"""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest
from support.checkpoint_states import FaultyFiles, Killed, QuickFiles, on_threads, state_on, tensors, without_threads
from support.nightly import daily

from mindformers_core.checkpoint import writer
from mindformers_core.checkpoint.folders import find_checkpoint, prune, step_folder
from mindformers_core.checkpoint.parts import on_all_ranks
from mindformers_core.checkpoint.save import clean, plan_save, save

DOCUMENTS = {"state.json": b'{"format": 1}', "config.json": b"{}"}
KEEP = 2
CASES = {  # ranks of the mesh, whether beside training, the step that is saved, faults
    "new_step": ("one", False, 3, ("kill", "EIO")),
    "again": ("one", False, 2, ("kill", "ENOSPC", "EIO", "EACCES")),
    "beside_new_step": ("one", True, 3, ("kill", "ENOSPC", "EIO", "EACCES")),
    "beside_again": ("one", True, 2, ("kill", "ENOSPC")),
    "four_ranks": ("dp_tp", False, 3, ("kill", "ENOSPC")),
    "four_ranks_beside": ("dp_tp", True, 2, ("kill", "EACCES")),
}
KILLS = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from support.checkpoint_states import FaultyFiles
from test_checkpoint_crashes import save_step
for number, run in enumerate(sys.argv[2:]):
    process = os.fork()
    if not process:
        files = FaultyFiles(3 + 6 * number, lambda: os.kill(os.getpid(), signal.SIGKILL))
        save_step(run, "one", number % 2 == 0, 2, 3, {0: files})
        os._exit(0)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
"""


def raises(name):
    """The function that does a fault."""

    def fault():
        number = getattr(errno, name, None)
        raise Killed if number is None else OSError(number, os.strerror(number))

    return fault


def state(name, seed):
    """Four tensors on a mesh of `MESHES`."""
    names = ("layers.0.column", "embed")
    return state_on({key: value for key, value in tensors(seed).items() if key[1] in names}, name)


def save_step(run, mesh, beside, step, seed, layers):
    """Save the state of a seed on all ranks, as a run does; `layers`: rank -> `FileLayer`."""
    folder, saved = step_folder(run, step), state(mesh, seed)
    everywhere = {rank: saved.parts(rank) for rank in saved.ranks}
    if not beside:

        def on_rank(ranks):
            files = layers[ranks.rank]
            save(folder, everywhere[ranks.rank], saved.value, DOCUMENTS, ranks, files=files)
            on_all_ranks(ranks, lambda: prune(folder, KEEP, files=files) if ranks.rank == 0 else None)

        on_threads(saved.ranks, on_rank)
        return
    plan, is_over = plan_save(everywhere), threading.Event()

    def wait_for(path):
        while not os.path.exists(path):
            if is_over.is_set():
                raise Killed
            time.sleep(0.001)

    def on_rank(ranks):
        pieces = plan.of_rank(ranks.rank)
        memory = np.zeros(writer.places(pieces)[1], np.uint8)
        for piece, copy in zip(pieces, writer.snapshot_arrays(pieces, memory)):
            copy[...] = saved.tensors[piece.key][1][tuple(slice(*each) for each in piece.box)]
        request = {"rank": ranks.rank, "folder": folder, "token": "0", "keep": (KEEP, 0)}
        request["documents"] = {path: text.decode() for path, text in DOCUMENTS.items()}
        try:
            writer.write_snapshot(everywhere, request, memory, layers[ranks.rank])
        except BaseException as error:
            is_over.set()  # parents end all writers
            return error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_await", wait_for)
        errors = [error for error in on_threads(saved.ranks, on_rank).values() if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Killed)):
        if isinstance(error, OSError):
            clean(folder, QuickFiles())  # as `BackgroundSave.settle`
        raise error


def quick(mesh):
    return dict.fromkeys(state(mesh, 0).ranks, QuickFiles())


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A run folder, as in the first lines of this file."""
    run = tmp_path_factory.mktemp("template")
    for step in (1, 2):
        save_step(run, "one", False, step, step, quick("one"))
    (run / "checkpoint/step_9.incomplete/optimizer").mkdir(parents=True)
    (run / "checkpoint/step_9.incomplete/optimizer/a.safetensors").write_bytes(b"1")
    return run


def names_of(run):
    return sorted(os.listdir(os.path.join(run, "checkpoint")))


def check_what_is_left(run, mesh, step, is_done):
    """Each complete checkpoint is whole, the newest one is found; the next save leaves nothing unfinished."""
    newest, seeds = find_checkpoint(run), {1: (1,), 2: (2,) if step == 3 else (3,) if is_done else (2, 3), 3: (3,)}
    found = {name: int(name.split("_")[1]) for name in [*names_of(run)] if "." not in name}
    assert os.path.basename(newest).removesuffix(".replaced") == f"step_{max(2, *found.values())}", names_of(run)
    for folder in {newest, *(step_folder(run, number) for number in found.values())}:
        number = int(os.path.basename(folder).removesuffix(".replaced").split("_")[1])
        assert number <= step
        for seed in seeds[number]:
            try:
                state("one", seed).check(folder)
                break
            except AssertionError:
                if seed == seeds[number][-1]:
                    raise
    if is_done:
        assert names_of(run) == ["step_1", "step_2", "step_3"][step - KEEP : step]
    save_step(run, mesh, False, 4, 4, quick(mesh))
    assert names_of(run) == [f"step_{max(2, *found.values())}", "step_4"]
    assert find_checkpoint(run) == step_folder(run, 4)


@pytest.mark.long
@pytest.mark.parametrize("case", daily(("new_step", "four_ranks_beside"), CASES))
def test_crash_matrix(tmp_path, template, monkeypatch, case):
    without_threads(monkeypatch)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path) as folder:
        points = run_case(template, os.path.join(folder, "run"), *CASES[case])
    print(f"{case}: {points} points")
    assert points >= 45 * len(CASES[case][-1])


def run_case(template, run, mesh, beside, step, faults):
    """All points of a case; their number."""
    points = 0
    for fault in faults:
        for rank in state(mesh, 0).ranks:
            for number in range(1, 200):
                shutil.copytree(template, run)
                layer, seen = FaultyFiles(number, raises(fault)), None
                try:
                    save_step(run, mesh, beside, step, 3, {**quick(mesh), rank: layer})
                except (OSError, Killed) as error:
                    seen = error
                is_reached = len(layer.calls) >= number
                assert is_reached or seen is None
                assert (type(seen) is Killed) == (fault == "kill" and is_reached)
                left = names_of(run)
                if isinstance(seen, OSError):
                    text = str(seen)
                    assert "\n" not in text and os.strerror(getattr(errno, fault)) in text
                    assert text.removeprefix(f"rank {rank}: ").startswith(f"the checkpoint {step_folder(run, step)} ")
                    assert "can't be saved: " in text or "is saved, but older ones can't be removed: " in text
                    assert "can't be saved" not in text or not any("." in name for name in left if "9" not in name)
                check_what_is_left(run, mesh, step, is_done=not is_reached)
                shutil.rmtree(run)
                if not is_reached:
                    break
                points += 1
    return points


def test_killed_processes(tmp_path, template):
    """SIGKILL in a child process at every sixth call, in turn of a save beside training and of one in it."""
    runs = [str(tmp_path / str(number)) for number in range(8)]
    for run in runs:
        shutil.copytree(template, run)
    subprocess.run([sys.executable, "-c", KILLS, os.path.dirname(__file__), *runs], check=True)
    for run in runs:
        check_what_is_left(run, "one", 2, is_done=False)


@pytest.mark.parametrize("has_given_up", [False, True])
def test_the_error_of_rank_0_comes_first(tmp_path, monkeypatch, has_given_up):
    """Where rank 0 has removed the unfinished folder, another rank's missing files are no error of that rank."""
    saved, folder = state("dp_tp", 1), str(tmp_path / "step_1")
    everywhere = {rank: saved.parts(rank) for rank in saved.ranks}
    memory = np.zeros(writer.places(plan_save(everywhere).of_rank(1))[1], np.uint8)
    monkeypatch.setattr(writer, "_await", lambda path: None)
    if not has_given_up:
        os.makedirs(folder + ".incomplete/ranks-0")
    with (
        nullcontext() if has_given_up else pytest.raises(OSError, match="step_1 can't be saved: .Errno 2. No such file")
    ):
        writer.write_snapshot(everywhere, {"rank": 1, "folder": folder, "token": "0", "keep": (0, 0)}, memory)


@pytest.mark.parametrize("step", [2, 3])
def test_all_is_on_the_disk_before_the_rename(tmp_path, template, step):
    """What a power cut would lose: files and lists of names that are changed, and not synced."""
    shutil.copytree(template, tmp_path / "run")
    files, changed = FaultyFiles(), set()
    save_step(tmp_path / "run", "one", False, step, 3, {0: files})
    folder = step_folder(tmp_path / "run", step)
    renamed = files.calls.index(("rename", folder + ".incomplete"))
    for name, path in files.calls[:renamed]:
        if name == "sync":
            changed.discard(path)
        elif name != "open":
            changed |= {path} if name in ("resize", "write") else {os.path.dirname(path), path}
    assert changed and not any(path.startswith(folder + ".incomplete") for path in changed)
    assert files.calls[renamed + 2] == ("sync", os.path.dirname(folder))
