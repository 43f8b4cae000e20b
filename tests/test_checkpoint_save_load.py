"""Checkpoints of simulated ranks: any mesh from any mesh, bit by bit; bytes counted; crashes; damaged files."""

import json
import os
import shutil
import tracemalloc

import numpy as np
import pytest
from checkpoint_states import CountingFiles, QuickFiles, State, random_tensors
from safetensors.numpy import load_file

from mindformers_core.checkpoint.convert import convert
from mindformers_core.checkpoint.folders import find_checkpoint, prune, step_folder
from mindformers_core.checkpoint.load import check_checksums, load, open_checkpoint
from mindformers_core.checkpoint.parts import divide
from mindformers_core.checkpoint.save import plan_save
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh

SHAPES = {  # a column weight, a row weight, one of three dims, a small one, a scalar, one on two stages
    "layers.0.column": (8, 12),
    "layers.1.row": (12, 8),
    "layers.0.kernel": (4, 8, 4),
    "layers.1.norm": (12,),
    "layers.0.scale": (),
    "embed": (16, 4),
}
MESHES = {  # (pp, dp, tp), ZeRO shards over dp
    "one": ((1, 1, 1), False),
    "dp": ((1, 4, 1), False),
    "zero": ((1, 4, 1), True),
    "tp": ((1, 1, 4), False),
    "dp_tp": ((1, 2, 2), False),
    "zero_tp": ((1, 2, 2), True),
    "pp_tp": ((2, 1, 2), False),
    "pp_zero_tp": ((2, 2, 2), True),
}


def state_on(tensors, name):
    """The tensors on a mesh of `MESHES`: stage 0 has layers.0, stage 1 layers.1, both have `embed`."""
    sizes, is_sharded = MESHES[name]
    mesh = DeviceMesh(sizes, ("pp", "dp", "tp"))
    stages = [mesh.sub_mesh(("dp", "tp"), rank) for rank in range(0, mesh.size, mesh.size // sizes[0])]
    layouts = {}
    for group, path in tensors:
        shape, zero = SHAPES[path], ("dp",) if is_sharded else ()
        dims = {"layers.0.column": (("tp", *zero), ()), "layers.1.row": (zero, ("tp",)), "embed": (("tp",), zero)}
        dims |= {"layers.0.kernel": ((), ("tp",), zero)}
        on = stages if path == "embed" else [stages[-1 if path.startswith("layers.1") else 0]]
        layouts[group, path] = [Layout.on(stage, dims.get(path, ((),) * len(shape))) for stage in on]
    return State(tensors, layouts)


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    return random_tensors(rng, SHAPES) | random_tensors(rng, SHAPES, "optimizer")


@pytest.mark.parametrize("source", MESHES)
def test_any_mesh_from_any_mesh(tmp_path, source):
    """64 pairs: every bit, the bytes written by all and read by each, and the checksums of all."""
    global_tensors, files = tensors(), CountingFiles()
    saved = state_on(global_tensors, source)
    plan = saved.save(str(tmp_path / "step_1"), {"state.json": b"{}"}, files)[0]
    size = sum(array.nbytes for _, array in global_tensors.values())
    lists = sum(
        len((tmp_path / "step_1" / path).read_bytes())
        for path in ("state.json", "checksums.json", "model.safetensors.index.json")
    )
    heads = sum(len(file.header) for group in plan.files.values() for file in group)
    assert files.counts["written"] - heads - lists == size == plan.nbytes - heads
    assert sum(os.path.getsize(path) for path in tmp_path.rglob("*") if path.is_file()) == size + heads + lists
    for target in MESHES:
        counting = CountingFiles()
        reports = state_on(global_tensors, target).check(str(tmp_path / "step_1"), counting)
        assert counting.counts["read"] == sum(report.read for report in reports)
        assert all(report.read == report.needed for report in reports)
        assert sum(report.verified for report in reports) == size
    assert check_checksums(open_checkpoint(str(tmp_path / "step_1"))) == size


def test_files_do_not_depend_on_the_mesh(tmp_path):
    for name in MESHES:
        state_on(tensors(), name).save(str(tmp_path / name / "step_1"))
    first = {path.name: path.read_bytes() for path in (tmp_path / "one/step_1").rglob("*.safetensors")}
    assert first.keys() == {"model-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors"}
    for name in MESHES:
        assert {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.safetensors")} == first, name
    numbers = load_file(tmp_path / "one/step_1/model-00001-of-00001.safetensors")
    assert numbers.keys() == SHAPES.keys()


def test_plans_balance_and_cut_large_tensors():
    state = state_on(tensors(), "dp")
    everywhere = {rank: state.parts(rank) for rank in state.ranks}
    plan = plan_save(everywhere, most=200, piece_bytes=48)
    assert len(plan.files["model"]) > 1
    loads = dict.fromkeys(state.ranks, 0)
    for piece in plan.pieces:
        nbytes = piece.placed.item_bytes * int(np.prod([stop - start for start, stop in piece.box]))
        assert nbytes <= 48
        loads[piece.rank] += nbytes
    assert max(loads.values()) - min(loads.values()) <= 48
    assert {key: len(boxes) for key, boxes in divide(everywhere).items()} == dict.fromkeys(state.tensors, 1)


def test_small_pieces_and_files(tmp_path, monkeypatch):
    monkeypatch.setattr("mindformers_core.checkpoint.save.plan_save", lambda parts: plan_save(parts, 200, 48))
    state_on(tensors(), "pp_zero_tp").save(str(tmp_path / "step_1"))
    assert len(list(tmp_path.rglob("model-*.safetensors"))) > 1
    for target in ("one", "zero_tp", "pp_tp"):
        state_on(tensors(), target).check(str(tmp_path / "step_1"))


def test_ranks_that_disagree_are_an_error(tmp_path):
    state = state_on(tensors(), "dp")
    whole = state.parts

    def parts(rank):
        found = whole(rank)
        return found if rank else [part.__class__(*part.key, "int8", part.shape, part.box) for part in found]

    state.parts = parts
    with pytest.raises(ValueError, match=r"tensor 'layers.0.column' is int8 of shape \(8, 12\) on rank 0, but float32"):
        state.save(str(tmp_path / "step_1"))
    state.parts = lambda rank: [part for part in whole(rank) if part.name != "embed"][: 3 + rank]
    assert state.save(str(tmp_path / "step_1"))


def other_state(change, seed=0):
    """One process' state after `change` of its tensors, to load."""
    found = tensors(seed)
    change(found)
    layouts = {key: [Layout.on(DeviceMesh((1,), ("dp",)), ((),) * array.ndim)] for key, (_, array) in found.items()}
    return State(found, layouts)


def rename(found):
    found["model", "layers.0.colum"] = found.pop(("model", "layers.0.column"))


def cut(found):
    dtype, array = found["model", "embed"]
    found["model", "embed"] = dtype, array[:15]


def retype(found):
    found["optimizer", "embed"] = "float32", np.zeros((16, 4), np.uint32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename, "has no model tensor 'layers.0.colum' .did you mean 'layers.0.column'"),
        (lambda found: found.pop(("optimizer", "embed")), "optimizer-.*: 'embed' isn't a tensor of this model"),
        (cut, r"model-00001-of-00001.safetensors: 'embed' has shape \(16, 4\), not \(15, 4\)"),
        (retype, "optimizer-.*: 'embed' has dtype float16, not float32"),
    ],
)
def test_other_tensors_are_errors(tmp_path, change, message):
    state_on(tensors(), "dp_tp").save(str(tmp_path / "step_1"))
    with pytest.raises(ValueError, match=message):
        other_state(change).load(str(tmp_path / "step_1"))


def test_weights_only_and_ignored_tensors(tmp_path):
    folder = str(tmp_path / "step_1")
    state_on(tensors(), "dp_tp").save(folder)
    weights = {key: value for key, value in tensors().items() if key[0] == "model"}
    assert len(state_on(weights, "pp_tp").check(folder)) == 4
    few = other_state(lambda found: [found.pop(("model", "embed")), *map(found.pop, list(found)[-6:])])
    with pytest.raises(ValueError, match="'embed' isn't a tensor of this model"):
        few.load(folder)
    few.load(folder, ignored=("embed",))


def test_converts_floats_where_asked(tmp_path):
    values = np.array([1.0, -0.0, 3.14159, 1e-7, 65504.0, np.inf, np.nan, 1.00390625], np.float32)
    state = other_state(lambda found: found.clear())
    state.tensors, mesh = {("model", "a"): ("float32", values.view(np.uint32))}, DeviceMesh((1,), ("dp",))
    state.layouts = {("model", "a"): [Layout.on(mesh, ((),))]}
    state.save(str(tmp_path / "step_1"))
    halves = values.astype(np.float16).view(np.uint16)
    for dtype, expected in (
        ("float16", halves),
        ("bfloat16", np.array([0x3F80, 0x8000, 0x4049, 0x33D7, 0x4780, 0x7F80, 0x7FC0, 0x3F80], np.uint16)),
    ):
        state.tensors["model", "a"] = dtype, expected
        with pytest.raises(ValueError, match=f"'a' has dtype float32, not {dtype}"):
            state.load(str(tmp_path / "step_1"))
        ((arrays, _),) = state.load(str(tmp_path / "step_1"), converts=True).values()
        np.testing.assert_array_equal(*arrays.values(), expected)
    np.testing.assert_array_equal(convert(convert(halves, "float16", "float32"), "float32", "float16"), halves)
    wide = convert(np.array([0x3F80, 0xC049], np.uint16), "bfloat16", "float32").view(np.float32)
    np.testing.assert_array_equal(wide, np.array([1.0, -3.140625], np.float32))
    with pytest.raises(ValueError, match="numbers up to 1e.06, which float16 doesn't have"):
        convert(np.array([1e6], np.float32).view(np.uint32), "float32", "float16")


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


class FailingFiles(QuickFiles):
    """Fails at the call with a number, among those that change the disk; `crash` makes all later calls fail as well."""

    def __init__(self, number, error, crash):
        self.__dict__.update(left=[number], error=error, crash=crash)

    def _count(self):
        self.left[0] -= 1
        if self.left[0] == 0 or (self.crash and self.left[0] < 0):
            raise self.error


for _name in ("make_folder", "resize", "write", "sync", "rename", "remove"):

    def _call(self, *arguments, _name=_name):
        self._count()
        return getattr(QuickFiles, _name)(self, *arguments)

    setattr(FailingFiles, _name, _call)


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


def test_a_newer_format_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("mindformers_core.checkpoint.save.FORMAT", 2)
    state_on(tensors(), "one").save(str(tmp_path / "step_1"))
    with pytest.raises(ValueError, match="step_1 has format 2, but this version of mindformers_core reads up to 1"):
        open_checkpoint(str(tmp_path / "step_1"))


def test_loading_needs_memory_for_the_local_state_and_the_largest_tensor(tmp_path):
    shapes = {f"layers.{number}": (64, 1024 * (1 + number % 3)) for number in range(9)}
    rng, mesh = np.random.default_rng(0), DeviceMesh((2,), ("tp",))
    held = {("model", name): ("float32", rng.integers(0, 2**32, shape, np.uint32)) for name, shape in shapes.items()}
    layouts = {
        key: [Layout.on(mesh, (("tp",), ()) if number % 2 else ((), ("tp",)))] for number, key in enumerate(held)
    }
    state = State(held, layouts)
    state.save(str(tmp_path / "step_1"))
    checkpoint, parts = open_checkpoint(str(tmp_path / "step_1")), state.parts(1)
    whole = [
        part.__class__("model", part.name, part.dtype, part.shape, ((0, 64), (0, part.shape[1]))) for part in parts
    ]
    largest, found = max(part.nbytes for part in whole), {}
    load(checkpoint, whole, lambda part, array: None)  # imports, caches
    tracemalloc.start()
    load(checkpoint, whole, found.__setitem__)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(array.nbytes for array in found.values()) >= 6 * largest
    assert peak < sum(array.nbytes for array in found.values()) + largest


def test_no_pickle(tmp_path):
    state_on(tensors(), "dp_tp").save(str(tmp_path / "step_1"), {"state.json": b"{}"})
    for path in (tmp_path / "step_1").rglob("*"):
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        elif path.is_file():
            load_file(path)
