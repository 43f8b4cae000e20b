"""Checkpoints that are damaged, saves that fail at any call, full disks, old and unfinished folders."""

import os
from pathlib import Path

import numpy as np
import pytest
from support.checkpoint_states import SHAPES, QuickFiles, state_on, tensors, without_threads
from support.nightly import daily

from mindformers_core.checkpoint.folders import find_checkpoint, prune, set_aside, step_folder
from mindformers_core.checkpoint.load import check_checksums, open_checkpoint

DOCUMENTS = {"state.json": b'{"format": 1, "step": 5}', "config.json": b'{"hidden_size": 8}'}


def saved_step(run_folder, step):
    """A new checkpoint of a run: its folder."""
    folder = step_folder(str(run_folder), step)
    state_on(tensors(), "one").save(folder, DOCUMENTS)
    return folder


def damaged_places(folder, rng, count):
    """So many places in all files of a checkpoint: (path, position, tensor's name or None); each region as often."""
    regions = [(path, 0, path.stat().st_size, None) for path in sorted(folder.rglob("*.json"))]
    tensors_found = open_checkpoint(str(folder)).tensors
    for path in sorted({placed.file for placed in tensors_found.values()}):
        regions.append((Path(path), 0, min(each.offset for each in tensors_found.values() if each.file == path), None))
    for (_, name), placed in tensors_found.items():
        regions.append((Path(placed.file), placed.offset, placed.offset + placed.nbytes, name))
    assert len(regions) == 4 + 2 + 2 * len(SHAPES)
    for number in range(count):
        path, start, stop, name = regions[number % len(regions)]
        yield path, int(rng.integers(start, stop)), name


@pytest.mark.parametrize("count", daily([100], [100, 1000]))
def test_every_damage_is_seen(tmp_path, monkeypatch, count):
    """Flipped bits and truncations in all files: by loading on a mesh, and by checking; names file and tensor."""
    without_threads(monkeypatch)
    rng, folder = np.random.default_rng(7), tmp_path / "step_1"
    state_on(tensors(), "zero_tp").save(str(folder), DOCUMENTS)
    one, several = state_on(tensors(), "one"), state_on(tensors(), "pp_zero_tp")
    for number, (path, position, name) in enumerate(list(damaged_places(folder, rng, count))):
        whole = path.read_bytes()
        data = bytearray(whole)
        if number % 10:
            data[position] ^= 1 << int(rng.integers(8))
        else:
            del data[position:]
        path.write_bytes(data)
        for read in ((several if number % 16 == 0 else one).check, lambda path: check_checksums(open_checkpoint(path))):
            with pytest.raises(ValueError, match=f"{path.name}.* (is|has a) damaged|isn't (a )?whole") as seen:
                read(str(folder))
            assert name is None or f"'{name}'" in str(seen.value)
        path.write_bytes(whole)
    several.check(str(folder))


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


def test_space_is_checked_before(tmp_path):
    class Full(QuickFiles):
        def free(self, folder):
            return 100

    with pytest.raises(OSError, match=r"step_1 can't be saved: rank 0: it needs .* KiB, but .* has 100 B left"):
        state_on(tensors(), "dp_tp").save(str(tmp_path / "step_1"), files=Full())
    assert os.listdir(tmp_path) == []


def test_old_checkpoints_are_removed(tmp_path):
    """What crashes left, too; a replaced checkpoint whose successor never came gets its name back."""
    for step in (2, 4, 6, 8, 10):
        (tmp_path / f"checkpoint/step_{step}").mkdir(parents=True)
    (tmp_path / "checkpoint/step_12.incomplete").mkdir()
    (tmp_path / "checkpoint/step_8.replaced").mkdir()
    (tmp_path / "checkpoint/step_12.replaced").mkdir()
    (tmp_path / "checkpoint/notes.incomplete").mkdir()
    (tmp_path / "checkpoint/notes").mkdir()
    prune(step_folder(tmp_path, 6), keep_last=1, keep_every=4)
    assert sorted(os.listdir(tmp_path / "checkpoint")) == [
        "notes", "notes.incomplete", "step_12", "step_4", "step_6", "step_8"
    ]  # fmt: skip
    prune(step_folder(tmp_path, 12), keep_last=0)
    assert len(os.listdir(tmp_path / "checkpoint")) == 6


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


def test_a_run_taken_up_at_an_earlier_step_gives_later_ones_up(tmp_path):
    """The newest one is of the steps that were run last, and `prune` counts those only."""
    for step in (8, 12, 16):
        saved_step(tmp_path, step)
    assert set_aside(str(tmp_path), 8) == ["step_12.given_up.1", "step_16.given_up.1"]
    for step in (9, 10):
        saved_step(tmp_path, step)
        prune(step_folder(str(tmp_path), step), 2)
    assert find_checkpoint(str(tmp_path)) == step_folder(str(tmp_path), 10)
    kept = ["step_10", "step_12.given_up.1", "step_16.given_up.1", "step_9"]
    assert sorted(os.listdir(tmp_path / "checkpoint")) == kept
    assert set_aside(str(tmp_path), 10) == []


def test_a_checkpoint_without_its_checksums_is_not_whole(tmp_path):
    folder = saved_step(tmp_path, 1)
    os.remove(os.path.join(folder, "checksums.json"))
    with pytest.raises(FileNotFoundError, match=r"has state.json, but no checksums.json: it isn't whole"):
        open_checkpoint(folder)
