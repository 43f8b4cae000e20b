"""The device mesh, and the layouts bound to it: coordinates, groups, slices, notations, errors."""

import copy
import itertools
import pickle
import random

import numpy as np
import pytest
from support.work import calls_in
from test_redistribution import random_layout

from mindformers_core.hints import nearest
from mindformers_core.layout import Layout, LayoutSpec, Partial, Replicate, Shard, Varying, bind_layout, layout
from mindformers_core.mesh import DeviceMesh, init_device_mesh, launch_rank

LAUNCHERS = ("RANK_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


@pytest.fixture
def mesh():
    return init_device_mesh((2, 4), ("dp", "tp"))


@pytest.fixture
def no_launcher(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


# Meshes.


def random_mesh(rng):
    shape = [rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(1, 4))]
    size = int(np.prod(shape))
    ranks = rng.sample(range(1000), size) if rng.random() < 0.5 else None
    return DeviceMesh(shape, ["pp", "dp", "cp", "tp"][: len(shape)], ranks)


def test_a_mesh_numbers_its_ranks_row_major(mesh):
    assert (mesh.shape, mesh.axis_names, mesh.size, mesh.ndim) == ((2, 4), ("dp", "tp"), 8, 2)
    assert [mesh.coordinate(rank) for rank in (0, 3, 4, 6)] == [(0, 0), (0, 3), (1, 0), (1, 2)]
    assert mesh.group(6, ("tp",)) == (4, 5, 6, 7) and mesh.group(6, ("dp",)) == (2, 6) and mesh.group(6, ()) == (6,)
    assert mesh.groups(("dp",)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.axis_size("dp", "tp") == 8 and mesh.axis_size() == 1
    assert init_device_mesh(4, "dp") == DeviceMesh((4,), ("dp",))


def test_coordinates_and_groups_equal_an_array_of_ranks():
    rng = random.Random(1)
    for _ in range(200):
        mesh = random_mesh(rng)
        array = np.array(mesh.rank_list).reshape(mesh.shape)
        axes = tuple(rng.sample(mesh.axis_names, rng.randint(0, mesh.ndim)))
        places = [mesh.axis_names.index(axis) for axis in axes]
        others = [place for place in range(mesh.ndim) if place not in places]
        expected = np.transpose(array, others + places).reshape(-1, mesh.axis_size(*axes))
        assert {tuple(row) for row in expected.tolist()} == set(mesh.groups(axes))
        for rank in mesh.rank_list:
            assert mesh.coordinate(rank) == tuple(np.argwhere(array == rank)[0])
            assert mesh.coordinate(rank, axes) == tuple(mesh.coordinate(rank)[place] for place in places)
            group = mesh.group(rank, axes)
            assert list(group) in expected.tolist() and group[mesh.group_index(rank, axes)] == rank
            assert mesh.rank_list[mesh.position(rank)] == rank


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_sub_meshes_are_those_of_the_launched_rank(mesh, no_launcher, launcher):
    assert launch_rank() == 0 and mesh["tp"] == DeviceMesh((4,), ("tp",), (0, 1, 2, 3))
    no_launcher.setenv(launcher, "6")
    assert launch_rank() == 6
    assert mesh["tp"] == DeviceMesh((4,), ("tp",), (4, 5, 6, 7)) and mesh["dp"].rank_list == (2, 6)
    assert mesh["dp", "tp"] == mesh and mesh["tp", "dp"].shape == (4, 2)
    assert mesh.sub_mesh("dp", rank=1) == DeviceMesh((2,), ("dp",), (1, 5))
    no_launcher.setenv(launcher, "77")
    with pytest.raises(ValueError, match="rank 77 is not in .*sub_mesh"):
        mesh["dp"]
    no_launcher.delenv(launcher)
    no_launcher.setenv("MS_ROLE", "MS_WORKER")
    with pytest.raises(ValueError, match="--node_rank"):
        mesh["dp"]
    no_launcher.delenv("MS_ROLE")
    with pytest.raises(ValueError, match="unknown mesh axis 'tq'.*dp=2, tp=4.*did you mean 'tp'"):
        mesh["tq"]


def test_meshes_are_values(mesh):
    same, ranked = DeviceMesh([2, 4], ["dp", "tp"]), DeviceMesh((2, 4), ("dp", "tp"), list(range(8)))
    assert mesh == same == ranked and len({mesh, same, ranked}) == 1
    others = [DeviceMesh((4, 2), ("dp", "tp")), DeviceMesh((2, 4), ("tp", "dp"))]
    others.append(DeviceMesh((2, 4), ("dp", "tp"), range(1, 9)))
    assert mesh not in others and len({mesh, *others}) == 4 and mesh != "mesh"
    assert pickle.loads(pickle.dumps(others[2])) == others[2] and copy.deepcopy(mesh) == mesh
    for name in ("shape", "size", "anything"):
        with pytest.raises(AttributeError, match=f"immutable.*{name}"):
            setattr(mesh, name, 1)
    assert str(mesh) == "(dp=2, tp=4)" and eval(repr(others[2])) == others[2] and eval(repr(mesh)) == mesh
    assert 7 in mesh and 8 not in mesh and 8 in others[2] and 0 not in others[2]


def test_large_meshes_are_little_work():
    """What a rank asks takes as many calls as the answer has ranks, and a few; so do all groups."""
    for shape, ranks in [((4, 16, 8, 32), None), ((16, 1024), list(reversed(range(16384))))]:
        names = ("pp", "dp", "cp", "tp")[: len(shape)]
        assert calls_in(DeviceMesh, shape, names, ranks) < 2 * 16384
        mesh = DeviceMesh(shape, names, ranks)
        assert mesh.size == 16384
        for rank in range(0, 16384, 256):
            assert calls_in(mesh.coordinate, rank) < 100
            assert calls_in(mesh.group, rank, names[-1:]) < 100 + shape[-1]
            assert calls_in(mesh.group_index, rank, names) < 100
        assert len(mesh.groups(names[:1])) == 16384 // shape[0]
        assert calls_in(mesh.groups, names[:1]) < 4 * 16384
        sharded = Layout.on(mesh, [names])
        assert sharded.local_slices((32768,), mesh.rank_list[-1]) == (slice(32766, 32768),)
        assert hash(mesh) == hash(DeviceMesh(mesh.shape, names, mesh.rank_list))


def test_unknown_ranks_and_axes_say_what_there_is(mesh):
    for ask in (mesh.coordinate, mesh.position, lambda rank: mesh.group(rank, ("tp",))):
        with pytest.raises(ValueError, match=r"rank 8 is not in \(dp=2, tp=4\)"):
            ask(8)
    with pytest.raises(ValueError, match="unknown mesh axis 'dpp'.*did you mean 'dp'"):
        mesh.axis_size("dpp")
    with pytest.raises(ValueError, match="unknown mesh axis 'zz': the mesh has dp=2, tp=4$"):
        mesh.groups(("zz",))
    assert nearest("sume", ("sum", "max")) == " (did you mean 'sum'?)" and nearest("xyz", ("sum",)) == ""


# Layouts.


def test_specifications_bind_to_any_mesh(mesh):
    assert layout("dp", "tp").bind(mesh).dims == (("dp",), ("tp",))
    assert layout(("dp", "tp"), "None").bind(mesh) == layout(["dp", "tp"], None).bind(mesh)
    assert layout("None", ("None", "tp")).bind(mesh).dims == ((), ("tp",))
    wide = DeviceMesh((2, 2, 2), ("dp", "cp", "tp"))
    assert layout("cp_dp", "None").bind(wide).dims == (("cp", "dp"), ())
    assert layout("dp_cp_tp").bind(wide).dims == (("dp", "cp", "tp"),)
    assert layout("dp").bind(mesh) != layout("dp").bind(wide)
    assert layout("dp") == layout("dp") and hash(layout("dp")) == hash(layout("dp")) != hash(layout("tp"))
    assert str(layout(..., ("dp", "tp"), None)) == "[..., (dp, tp), -]" and isinstance(layout(), LayoutSpec)


def test_joined_names_prefer_an_axis_of_that_name():
    named = DeviceMesh((2, 2, 2), ("cp", "dp", "cp_dp"))
    assert layout("cp_dp").bind(named).dims == (("cp_dp",),)
    odd = DeviceMesh((2, 2, 2), ("a", "a_b", "c"))
    assert layout("a_b_c").bind(odd).dims == (("a_b", "c"),)


def test_dims_left_over_keep_what_arrives(mesh):
    arriving = Layout.on(mesh, [("dp",), (), ("tp",)])
    assert layout(..., "tp").bind(mesh, 3, arriving).dims == (("dp",), (), ("tp",))
    assert layout(..., None).bind(mesh, 3, arriving).dims == (("dp",), (), ())
    assert layout("tp", ...).bind(mesh, 3, arriving).dims == (("tp",), (), ())
    assert layout(None, ..., "dp").bind(mesh, 3).dims == ((), (), ("dp",))
    assert layout("dp", ..., "tp").bind(mesh, 2).dims == (("dp",), ("tp",))
    assert layout("dp").bind(mesh, 3).dims == (("dp",), (), ())


def test_the_three_notations_agree(mesh):
    seeds = Layout((2, 4), ("dp", "tp"))
    assert seeds("dp", "tp") == layout("dp", "tp").bind(mesh) == Layout.on(mesh, [("dp",), ("tp",)])
    assert seeds(("dp", "tp"), "None") == seeds("dp_tp", None)
    assert seeds.mesh == mesh and seeds.dims == () and seeds.is_replicated
    assert Layout((2, 4), ("dp", "tp"), rank_list=range(8, 16))("dp").local_slices((2,), 12) == (slice(1, 2),)
    for declared in (layout("dp", "tp"), seeds("dp", "tp"), ("dp", "tp"), ["dp", "tp"]):
        assert bind_layout(declared, mesh) == seeds("dp", "tp")
        assert bind_layout(declared, mesh, ndim=3).dims == (("dp",), ("tp",), ())


def test_mindspore_layouts_are_accepted(mesh):
    mindspore = pytest.importorskip("mindspore")
    theirs = mindspore.Layout((2, 4), ("dp", "tp"))
    for entries in [("dp", "tp"), ("None", "dp"), (("dp", "tp"), "None"), (("tp", "dp"),), ("None", "None")]:
        declared = theirs(*entries)
        bound = bind_layout(declared, mesh)
        assert bound == layout(*entries).bind(mesh) == bind_layout(declared, None)
        parts = declared.to_dict()
        their_map = tuple(tuple(entry) if isinstance(entry, (list, tuple)) else entry for entry in parts["tensor_map"])
        assert bound.tensor_map == their_map and bound.device_matrix == tuple(parts["device_matrix"])
    with pytest.raises(ValueError, match="another mesh"):
        bind_layout(theirs("dp", "tp"), DeviceMesh((4, 2), ("dp", "tp")))


def test_placements_on_every_axis(mesh):
    wide = DeviceMesh((2, 2, 2, 2, 1), ("a", "b", "c", "d", "e"))
    placed = Layout.on(wide, [(), ("a", "e")], {"b": "max"}, ["c"])
    assert placed.placements == (Shard(1), Partial("max"), Varying(), Replicate(), Replicate())
    assert placed.placement("a") == Shard(1) and placed.dims == ((), ("a",)) and not placed.is_replicated
    assert Layout.on(wide, [(), ()]).is_replicated and Partial() == Partial("sum")
    assert Layout.on(mesh, [("dp", "tp"), ()]).divisor(0) == 8
    with pytest.raises(ValueError, match="unknown mesh axis 'f'"):
        placed.placement("f")
    with pytest.raises(ValueError, match="Partial.'mean'.*sum, max, min, avg"):
        Partial("mean")


def test_axes_of_size_one_place_nothing():
    mesh = DeviceMesh((1, 2), ("dp", "tp"))
    bare = Layout.on(mesh, [(), ("tp",)])
    assert Layout.on(mesh, [("dp",), ("tp",)]) == bare
    assert Layout.on(mesh, [(), ("dp", "tp")]) == bare
    assert Layout.on(mesh, [(), ("tp",)], {"dp": "sum"}) == bare == Layout.on(mesh, [(), ("tp",)], varying=["dp"])


def test_slices_cover_the_global_tensor_once_per_replica():
    rng = random.Random(2)
    for _ in range(300):
        mesh, ndim = random_mesh(rng), rng.randint(0, 3)
        placed = random_layout(mesh, ndim, rng)
        shape = tuple(placed.divisor(dim) * rng.randint(1, 3) for dim in range(ndim))
        held = np.zeros(shape, int)
        for rank in mesh.rank_list:
            part = held[(*placed.local_slices(shape, rank), ...)]
            assert part.shape == placed.local_shape(shape)
            part += 1
        sharded = mesh.axis_size(*itertools.chain(*placed.dims))
        assert (held == mesh.size // sharded).all()
        assert placed.global_shape(placed.local_shape(shape)) == shape
        others = [axis for axis in mesh.axis_names if axis not in itertools.chain(*placed.dims)]
        for group in mesh.groups(others):
            assert len({str(placed.local_slices(shape, rank)) for rank in group}) == 1


def test_axes_on_one_dim_cut_major_to_minor(mesh):
    rows, columns = Layout.on(mesh, [("dp", "tp")]), Layout.on(mesh, [("tp", "dp")])
    assert [rows.local_slices((8,), rank)[0].start for rank in range(8)] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [columns.local_slices((8,), rank)[0].start for rank in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert rows != columns


def test_layouts_are_values(mesh):
    placed = Layout.on(mesh, [("dp",), ()], {"tp": "sum"})
    same = Layout.on(DeviceMesh((2, 4), ("dp", "tp")), [["dp"], []], [("tp", "sum")])
    assert placed == same and hash(placed) == hash(same) and len({placed, same}) == 1
    different = [placed.replace(partial={}), placed.replace(partial={"tp": "avg"}), placed.replace(dims=[(), ("dp",)])]
    different.append(placed.replace(partial={}, varying=["tp"]))
    assert len({placed, *different}) == 5 and placed != "layout"
    assert placed.replace() == placed and pickle.loads(pickle.dumps(placed)) == placed == copy.deepcopy(placed)
    marks = DeviceMesh((2, 2), ("a", "b"))
    assert Layout.on(marks, [()], varying=["b", "a"]) == Layout.on(marks, [()], varying=["a", "b"])
    for name in ("dims", "mesh", "anything"):
        with pytest.raises(AttributeError, match=f"immutable.*{name}"):
            setattr(placed, name, 1)


def test_wrong_layouts_say_why(mesh):
    for wrong, words in [
        (lambda: layout("dq").bind(mesh), "unknown mesh axis 'dq'.*dp=2, tp=4.*did you mean 'dp'"),
        (lambda: layout("dp_tq").bind(mesh), "unknown mesh axis 'dp_tq'"),
        (lambda: layout(("dp", "tq")).bind(mesh), "unknown mesh axis 'tq'"),
        (lambda: layout("dp", "dp").bind(mesh), "axis 'dp' is used twice.*dp, dp"),
        (lambda: layout("dp_dp").bind(mesh), "axis 'dp' is used twice"),
        (lambda: Layout.on(mesh, [("dp",)], {"dp": "sum"}), "axis 'dp' is used twice"),
        (lambda: Layout.on(mesh, [()], {"tp": "sum"}, ["tp"]), "axis 'tp' is used twice"),
        (lambda: Layout.on(mesh, [()], {"tp": "summ"}), "Partial.'summ'.*did you mean 'sum'"),
        (lambda: Layout.on(mesh, [()], varying=["to"]), "unknown mesh axis 'to'"),
        (lambda: layout("dp", "tp", None).bind(mesh, 2, name="x"), "x: .*dp, tp, -.: it has 3 entries.*2 dims: drop 1"),
        (lambda: bind_layout(Layout.on(mesh, [(), ()]), mesh, 1, name="x"), "x: .*2 entries.*1 dims"),
        (lambda: layout(..., "dp", ...), "may stand once"),
        (lambda: bind_layout(layout("dp"), None, name="x"), "x: layout .dp. is on no mesh"),
        (lambda: bind_layout(Layout((4, 2), ("dp", "tp"))("dp"), mesh, name="x"), "x: .*another mesh"),
        (lambda: layout("dp", "tp").bind(mesh).local_shape((8, 6), "x"), "x of .*6.: dim 1 has size 6.*tp .*4 parts"),
        (lambda: layout("dp_tp").bind(mesh).local_shape((12,)), "dim 0 has size 12.*dp, tp of .dp=2, tp=4. .*8 parts"),
        (lambda: layout("dp").bind(mesh).local_shape((8, 8)), "has 2 dims.*1"),
        (lambda: layout("dp").bind(mesh).global_shape((8, 8)), "doesn't fit.*1 dims"),
    ]:
        with pytest.raises(ValueError, match=words):
            wrong()
    calls = [(layout, (3,)), (layout, (("dp", 3),)), (bind_layout, (3, mesh)), (bind_layout, ("dp", mesh))]
    for function, arguments in calls:
        with pytest.raises(TypeError, match="layout"):
            function(*arguments)


def test_an_axis_is_split_into_several():
    """Ranks stay where they are; a group over the new axes together is that over the old one."""
    mesh = init_device_mesh((8, 2), ("dp", "tp"))
    split = mesh.split_axis("dp", dp_replicate=2, dp_shard=4)
    assert (split.shape, split.axis_names) == ((2, 4, 2), ("dp_replicate", "dp_shard", "tp"))
    for rank in range(16):
        assert split.group(rank, ("dp_replicate", "dp_shard")) == mesh.group(rank, ("dp",))
        assert split.coordinate(rank, ("tp",)) == mesh.coordinate(rank, ("tp",))
        replica, shard = split.coordinate(rank, ("dp_replicate", "dp_shard"))
        assert mesh.coordinate(rank, ("dp",)) == (4 * replica + shard,)
    with pytest.raises(ValueError, match=r"split_axis\('dp'\): a 3 x b 2 is not the axis's size 8 in \(dp=8, tp=2\)"):
        mesh.split_axis("dp", a=3, b=2)
    with pytest.raises(ValueError, match="mesh axis 'tp' is named twice"):
        mesh.split_axis("dp", tp=4, b=2)
    with pytest.raises(ValueError, match=r"unknown mesh axis 'ep'.*did you mean"):
        mesh.split_axis("ep", a=4, b=2)
