"""Communication in one process: reading the environment, choosing a backend, dry runs, counting, errors."""

import mindspore as ms
import numpy as np
import pytest

from mindformers_core import communication as comm
from mindformers_core.communication import count_collectives, init_distributed, read_launch, shutdown
from mindformers_core.communication.backend_native import NativeCollective
from mindformers_core.communication.groups import Group
from mindformers_core.communication.world import Launch, process_state
from mindformers_core.layout import Layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.redistribution import plan_redistribution
from mindformers_core.redistribution.steps import STEP_KINDS

MSRUN = {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4", "RANK_ID": "2"}


@pytest.fixture(autouse=True)
def fresh_world(monkeypatch):
    for variable in (*MSRUN, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    shutdown()
    yield
    shutdown()


@pytest.fixture
def dry():
    """A mesh of 4 x 8 of which this process plays rank 13, at (1, 5)."""
    init_distributed("fake", world_size=32, rank=13)
    return init_device_mesh((4, 8), ("dp", "tp"))


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, Launch("none", 0, 1)),
        (MSRUN, Launch("msrun", 2, 4)),
        ({"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "16"}, Launch("msrun", None, 16)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}, Launch("mpirun", 3, 8)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Launch("mpirun", 0, 2)),
    ],
)
def test_reads_launchers(environ, launch):
    assert read_launch(environ) == launch


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"MS_ROLE": "MS_WORKER", "RANK_ID": "0"}, "MS_WORKER_NUM=''.*msrun.*whole number"),
        ({**MSRUN, "RANK_ID": "4"}, "msrun says rank 4 of 4"),
        ({"MS_ROLE": "MS_PSERVER"}, "MS_ROLE=MS_PSERVER.*start with msrun"),
        ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_RANK='x'"),
    ],
)
def test_wrong_environment(environ, message):
    with pytest.raises(ValueError, match=message):
        read_launch(environ)


def test_single_process_is_a_world():
    world = init_distributed()
    assert (world.rank, world.size, world.backend, world.launcher) == (0, 1, "cpu", "none")
    assert init_distributed() is world is comm.world()
    mesh = init_device_mesh((1, 1), ("dp", "tp"))
    x = ms.Tensor(np.ones((3, 2), np.float32))
    with count_collectives() as counts:
        gather, scatter = comm.AllGather(mesh, "dp", 0), comm.ReduceScatter(mesh, (), 1, "max")
        for collective in (comm.AllReduce(mesh, "tp"), gather, scatter):
            np.testing.assert_array_equal(collective(x).asnumpy(), x.asnumpy())
            np.testing.assert_array_equal(ms.grad(collective)(x).asnumpy(), np.ones((3, 2)))
    assert counts == {}


def test_wrong_arguments(monkeypatch):
    with pytest.raises(RuntimeError, match="call init_distributed"):
        comm.world()
    with pytest.raises(ValueError, match="unknown backend 'nativ'.*did you mean 'native'"):
        init_distributed("nativ")
    with pytest.raises(ValueError, match="4 ranks are asked for, but 1 were started.*--worker_num=4"):
        init_distributed(world_size=4)
    with pytest.raises(ValueError, match="'native' can't run on device target CPU: use 'cpu'"):
        init_distributed("native")
    with pytest.raises(ValueError, match="give the number of ranks"):
        init_distributed("fake")
    with pytest.raises(ValueError, match="a rank of 4 is 0 to 3"):
        init_distributed("fake", world_size=4, rank=4)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="mpirun can't start CPU ranks.*msrun --worker_num=2"):
        init_distributed()


def test_one_world_at_a_time(dry):
    assert init_distributed("fake", world_size=32, rank=13) is comm.world()
    with pytest.raises(RuntimeError, match="already initialised as rank 13 of 32.*shutdown"):
        init_distributed("fake", world_size=8)


def test_memos_die_with_the_world(dry):
    """One dict for ever, so that a holder never has an old one, empty in every new world."""
    memo, other = process_state().memo("some.module"), process_state().memo("another.module")
    memo["rank"] = other["rank"] = comm.world().rank
    assert process_state().memo("some.module") is memo == {"rank": 13}
    shutdown()
    init_distributed("fake", world_size=32, rank=7)
    assert process_state().memo("some.module") is memo == {} == other
    assert memo is not other


def test_communicators_die_with_the_world(dry):
    """A Cell knows its rank, so a new world gets new ones."""
    (step,) = plan_redistribution(Layout.on(dry, ((),)), Layout.on(dry, (("tp",),)), (8,), "float32").steps
    x = ms.Tensor(np.arange(8, dtype=np.float32))
    assert comm.communicator(dry).cell(step)(x).asnumpy().tolist() == [5]
    shutdown()
    init_distributed("fake", world_size=32, rank=7)
    assert comm.communicator(dry).cell(step)(x).asnumpy().tolist() == [7]


def test_parts_of_gradients_are_contiguous(dry):
    """A view with an offset or strides would be wrong in MindSpore's gradients of splits; what is none isn't copied."""
    x = ms.Tensor(np.arange(64, dtype=np.float32).reshape(8, 8))
    for axis, dim in (("dp", 0), ("dp", 1), ("tp", 0)):  # at places 1 of 4 and 5 of 8
        gather = comm.AllGather(dry, axis, dim)
        part = gather.bprop(None, None, x)[0]
        expected = np.split(x.asnumpy(), gather.backward.size, dim)[gather.backward.index]
        np.testing.assert_array_equal(part.asnumpy(), expected)
        assert part.is_contiguous() and part.storage_offset() == 0
    gather.backward.index = 0
    assert gather.backward(x).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("device", ["CPU", "meta"])
def test_dry_run_shapes(dry, device):
    whole = ("dp", "tp")
    expected = {
        comm.AllReduce(dry, whole): (64, 32),
        comm.AllGather(dry, whole, 1): (64, 1024),
        comm.AllGatherVarying(dry, "tp", 0): (512, 32),
        comm.ReduceScatter(dry, whole, 0): (2, 32),
        comm.AllToAll(dry, "tp", 0, 1): (512, 4),
        comm.SliceToShard(dry, "dp", 1): (64, 8),
        comm.PadToPartial(dry, "dp", 1): (64, 128),
        comm.MarkVarying(dry, "dp"): (64, 32),
    }
    with ms.DeviceCtx(device) if device == "meta" else count_collectives():
        for collective, shape in expected.items():
            assert collective(ms.Tensor(np.ones((64, 32), np.float16))).shape == shape
            assert collective(ms.Tensor(np.ones((64, 32), np.float16))).dtype == ms.float16


def test_dry_run_gradients_count(dry):
    x = ms.Tensor(np.ones((64, 32), np.float32))
    with count_collectives() as outer, count_collectives() as counts:
        ms.grad(lambda x: comm.AllGatherVarying(dry, "tp", 0)(x).sum())(x)
    assert (
        outer
        == counts
        == {
            ("all_gather", ("tp",)): (1, 7 * 64 * 32 * 4),
            ("reduce_scatter", ("tp",)): (1, 7 * 64 * 32 * 4),
        }
    )
    comm.AllReduce(dry, "tp")(x)
    assert len(counts) == 2


def test_steps_become_cells(dry):
    communicator = comm.communicator(dry)
    assert comm.communicator(init_device_mesh((4, 8), ("dp", "tp"))) is communicator
    layouts = [
        Layout.on(dry, (("dp",), ())),
        Layout.on(dry, (("tp", "dp"), ())),
        Layout.on(dry, ((), ("tp",)), partial={"dp": "sum"}),
        Layout.on(dry, ((), ("dp",)), varying=("tp",)),
        Layout.on(dry, ((), ()), partial={"dp": "avg", "tp": "sum"}),
        Layout.on(dry, ((), ()), partial={"dp": "max"}),
        Layout.on(dry, (("dp", "tp"), ())),
        Layout.on(dry, ((), ()), varying=("tp",)),
        Layout.on(dry, ((), ()), partial={"tp": "sum"}),
    ]
    kinds = set()
    for source in layouts:
        for target in layouts[:4] + layouts[6:]:
            x = ms.Tensor(np.ones(source.local_shape((64, 32)), np.float32))
            for step in plan_redistribution(source, target, (64, 32), "float32").steps:
                kinds.add(step.kind)
                cell = communicator.cell(step)
                assert communicator.cell(step) is cell
                with count_collectives() as counts:
                    x = cell(x)
                name, nbytes = step.forward
                assert sum(total for _, total in counts.values()) == nbytes, step
                assert {kind for kind, _ in counts} <= {name}
                assert x.shape == step.output_shape, step
            assert x.shape == target.local_shape((64, 32))
    assert kinds == {kind for kind, row in STEP_KINDS.items() if row.source}
    with pytest.raises(ValueError, match="not on this communicator's"):
        comm.communicator(init_device_mesh((32,), ("tp",))).cell(step)
    with pytest.raises(TypeError, match="give a DeviceMesh"):
        comm.communicator((4, 8))


def test_wrong_collectives(dry):
    with pytest.raises(ValueError, match="unknown mesh axis 'tpp'.*did you mean 'tp'"):
        comm.AllReduce(dry, "tpp")
    with pytest.raises(ValueError, match="named twice"):
        comm.AllReduce(dry, ("tp", "tp"))
    with pytest.raises(ValueError, match="unknown reduction 'mx'.*'max'"):
        comm.AllReduce(dry, "tp", "mx")
    with pytest.raises(ValueError, match="has 64 ranks.*but 32 run"):
        comm.AllReduce(init_device_mesh((64,), ("tp",)), "tp")
    with pytest.raises(ValueError, match=r"\(3, 5\) can't be cut along dim 1 into 8 equal parts"):
        comm.ReduceScatter(dry, "tp", 1)(ms.Tensor(np.ones((3, 5), np.float32)))
    with pytest.raises(TypeError, match="avg.*needs floats"):
        comm.AllReduce(dry, "tp", "avg")(ms.Tensor(np.ones(4, np.int32)))
    with pytest.raises(ValueError, match="Permute over dp and tp.*can't go from"):
        comm.Permute(dry, ("dp", "tp"), Layout.on(dry, (("dp", "tp"),)), Layout.on(dry, (("dp",),)))


@pytest.mark.parametrize("rank", range(6))
def test_a_permute_sends_to_who_takes_its_part(rank):
    """On 2 x 3 ranks, unlike 2 x 2, that isn't who has the part that it takes."""
    init_distributed("fake", world_size=6, rank=rank)
    mesh, taken = init_device_mesh((2, 3), ("dp", "tp")), [0, 2, 4, 1, 3, 5]  # rank -> whose part it gets
    permute = comm.Permute(mesh, mesh.axis_names, *(Layout.on(mesh, (axes,)) for axes in (("dp", "tp"), ("tp", "dp"))))
    destinations = tuple(map(taken.index, range(6)))
    assert permute.forward.arguments == (destinations, tuple(taken))
    assert permute.backward.arguments == (tuple(taken), destinations)
    shift = comm.Shift(mesh, "tp", -1)
    assert (permute.forward.options, shift.forward.options, shift.backward.options) == ("", "by 2", "by 1")


def test_native_backend_uses_mindspores_operators(monkeypatch):
    """Which operator, with which group and attributes; they can only run on Ascend and GPU."""
    init_distributed("fake", world_size=4, rank=1)
    for module in ("mindspore.ops.operations.comm_ops",):
        monkeypatch.setattr(f"{module}.get_rank", lambda group: 1)
        monkeypatch.setattr(f"{module}.get_group_size", lambda group: 4)
    group = Group(("tp", "dp"), (0, 2, 1, 3), 2, "a_group")
    reduce = NativeCollective(group, "all_reduce", "max").operator
    assert (reduce.name, reduce.op, reduce.group) == ("AllReduce", "max", "a_group")
    scatter = NativeCollective(group, "reduce_scatter", 1, "sum")
    assert (scatter.operator.name, scatter.operator.op, scatter.operator.group) == ("ReduceScatter", "sum", "a_group")
    assert NativeCollective(group, "all_gather", 0).operator.group == "a_group"
