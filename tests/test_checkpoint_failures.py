"""Checkpoints that are damaged, saves that fail at any call, full disks, old and unfinished folders."""

import os
import shutil

import numpy as np
import pytest
from checkpoint_states import FailingFiles, QuickFiles, state_on, tensors

from mindformers_core.checkpoint.folders import find_checkpoint, prune, step_folder
from mindformers_core.checkpoint.load import check_checksums, open_checkpoint


@pytest.mark.parametrize("target", ["one", "pp_zero_tp"])
def test_every_damage_is_seen(tmp_path, target):
    """Flipped bits anywhere in all files, and truncated files: by loading on a mesh, and by checking."""
    rng, folder = np.random.default_rng(7), tmp_path / "step_1"
    state_on(tensors(), "zero_tp").save(str(folder), {"state.json": b'{"format": 1, "step": 5}'})
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(paths) == 5
    sizes = np.array([path.stat().st_size for path in paths])
    for number in range(300 if target == "one" else 40):
        path = paths[rng.choice(len(paths), p=sizes / sizes.sum())]
        data = bytearray(path.read_bytes())
        whole, position = bytes(data), int(rng.integers(len(data)))
        if number % 10:
            data[position] ^= 1 << int(rng.integers(8))
        else:
            del data[position:]
        path.write_bytes(data)
        with pytest.raises((ValueError, OSError)) as seen:
            state_on(tensors(), target).check(str(folder))
        assert path.name in str(seen.value)
        if number % 10 and path.suffix == ".safetensors":
            with pytest.raises(ValueError, match=f"{path.name}.* (is|has a) damaged|isn't whole"):
                check_checksums(open_checkpoint(str(folder)))
        path.write_bytes(whole)
    state_on(tensors(), target).check(str(folder))


def test_swapped_tensors_are_seen(tmp_path):
    """The same bytes in another order: what a rank that writes to a wrong place would leave."""
    folder = tmp_path / "step_1"
    state_on(tensors(), "one").save(str(folder))
    path = folder / "model-00001-of-00001.safetensors"
    placed = open_checkpoint(str(folder)).tensors["model", "layers.0.column"]
    data = bytearray(path.read_bytes())
    middle, end = placed.offset + placed.nbytes // 2, placed.offset + placed.nbytes
    data[placed.offset : end] = data[middle:end] + data[placed.offset : middle]
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"is damaged: 'layers.0.column'\[0:8, 0:12\] isn't what was saved"):
        check_checksums(open_checkpoint(str(folder)))


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("crash", [False, True])
def test_a_save_that_fails_anywhere_leaves_the_newest_checkpoint(tmp_path, is_there, crash):
    """After each call that changes the disk: the checkpoint before, or the new one, whole; never a mixture."""
    old, new = tensors(1), tensors(2)
    last, calls = str(tmp_path / "run"), 0
    for number in range(1, 200):
        shutil.rmtree(last, ignore_errors=True)
        state_on(old, "one").save(step_folder(last, 1))
        target = step_folder(last, 1 if is_there else 2)
        try:
            state_on(new, "one").save(target, files=FailingFiles(number, OSError(28, "No space left on device"), crash))
        except OSError as error:
            calls += 1
            assert str(error).startswith(f"the checkpoint {target} can't be saved: [Errno 28] No space left on device")
            assert "\n" not in str(error)
        else:
            break
        newest = find_checkpoint(last)
        for found in (old, new):
            try:
                state_on(found, "one").check(newest)
                break
            except AssertionError:
                assert found is old
        else:
            raise AssertionError(f"{newest} is neither of both")
        state_on(new, "one").save(target)
        state_on(new, "one").check(find_checkpoint(last))
    assert calls > 20


def test_space_is_checked_before(tmp_path):
    class Full(QuickFiles):
        def free(self, folder):
            return 100

    with pytest.raises(OSError, match=r"step_1 can't be saved: rank 0: it needs .* KiB, but .* has 100 B left"):
        state_on(tensors(), "dp_tp").save(str(tmp_path / "step_1"), files=Full())
    assert os.listdir(tmp_path) == []


def test_old_checkpoints_are_removed(tmp_path):
    for step in (2, 4, 6, 8, 10):
        (tmp_path / f"checkpoint/step_{step}").mkdir(parents=True)
    (tmp_path / "checkpoint/step_12.incomplete").mkdir()
    (tmp_path / "checkpoint/step_8.replaced").mkdir()
    (tmp_path / "checkpoint/notes").mkdir()
    prune(step_folder(tmp_path, 6), keep_last=1, keep_every=4)
    assert sorted(os.listdir(tmp_path / "checkpoint")) == ["notes", "step_10", "step_4", "step_6", "step_8"]
    prune(step_folder(tmp_path, 10), keep_last=0)
    assert len(os.listdir(tmp_path / "checkpoint")) == 5


def test_the_newest_complete_checkpoint_is_found(tmp_path):
    for name in ("step_2", "step_9", "step_10", "step_11.incomplete", "step_12.replaced", "step_13"):
        (tmp_path / "checkpoint" / name).mkdir(parents=True)
        if name != "step_13":
            (tmp_path / "checkpoint" / name / "checksums.json").touch()
    assert find_checkpoint(tmp_path) == str(tmp_path / "checkpoint/step_12.replaced")
    (tmp_path / "checkpoint/step_12").mkdir()
    (tmp_path / "checkpoint/step_12/checksums.json").touch()
    assert find_checkpoint(tmp_path) == str(tmp_path / "checkpoint/step_12")
    with pytest.raises(FileNotFoundError, match="nowhere' is neither a checkpoint"):
        find_checkpoint(tmp_path / "nowhere")
