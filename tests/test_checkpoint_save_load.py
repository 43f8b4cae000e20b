"""Checkpoints of simulated ranks: any mesh from any mesh, bit by bit; bytes counted."""

import os
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.checkpoint_states import MESHES, SHAPES, CountingFiles, State, state_on, tensors

from mindformers_core.checkpoint.load import check_checksums, load, open_checkpoint
from mindformers_core.checkpoint.parts import divide
from mindformers_core.checkpoint.save import plan_save
from mindformers_core.dtypes import convert
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh


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


def test_a_newer_format_is_an_error(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("mindformers_core.checkpoint.index.FORMAT", 2)
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
