"""Draws: the numbers of one card on every mesh, seeded or not, by both engines and compiled, and however a batch is
divided: into micro-steps, over ranks with batches of their own, into micro-batches of a pipeline."""

from contextlib import contextmanager
from importlib import import_module

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from pipeline_models import assert_alike, schedule_of, train
from support.launch import on_ranks
from truth import once

from mindformers_core.communication import world
from mindformers_core.communication.messages import gather_values
from mindformers_core.dtensor.interception import draws_by_position
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh, init_device_mesh
from mindformers_core.pipeline import Schedule1F1B, ScheduleZBV
from mindformers_core.recompute import recompute
from mindformers_core.tensor_parallel import jit, shard
from mindformers_core.zero import hsdp, value_and_grad

SHAPE = (8, 16)
MESHES = {2: [((2,), ("dp",))], 4: [((4,), ("dp",)), ((2, 2), ("dp", "tp"))]}
SEEDS = (0, 5)  # 0: the generator's state at the start of a process


class Noisy(nn.Cell):
    def construct(self, x):
        plain = mint.zeros(x.shape)
        drawn = plain.normal_() + mint.rand_like(mint.zeros(x.shape))
        return x * 0 + ops.standard_normal(x.shape) + ops.rand(*x.shape) + drawn


@contextmanager
def nothing_seeded():
    """As if `ms.set_seed` hadn't been called: MindSpore's own draws differ from process to process then."""
    module, before = import_module("mindspore.common.seed"), ms.get_seed()
    module._GLOBAL_SEED = None
    try:
        yield
    finally:
        module._GLOBAL_SEED = before


def drawn(net, x, seed):
    """The whole result for a state of the generator."""
    ms.manual_seed(seed)
    found = net(x)
    return (found.full_tensor() if hasattr(found, "full_tensor") else found).asnumpy()


@on_ranks(2, nightly=(4,))
def case_draws_without_tensors_are_those_of_one_card():
    """In every mode; those of a mesh of one rank are in `test_draws`."""
    with nothing_seeded():
        with draws_by_position():
            truth = [drawn(Noisy(), Tensor(np.zeros(SHAPE, np.float32)), seed) for seed in SEEDS]
        assert abs(truth[0] - truth[1]).max() > 0.1
        for place, given in enumerate(MESHES[world().size]):
            mesh = init_device_mesh(*given)
            cut = Layout.on(mesh, [(axis,) for axis in mesh.axis_names] + [()] * (2 - mesh.ndim))
            plan = {"": {"input": {"x": cut}, "output": Layout.on(mesh, [(), ()])}}
            part = Tensor(np.zeros(cut.local_shape(SHAPE), np.float32))
            for mode in ("generated", "jit") if place else ("generated", "jit", "eager"):
                net = shard(Noisy(), mesh, plan=plan, mode=mode.replace("jit", "generated"))
                net = jit(net) if mode == "jit" else net
                for seed, expected in zip(SEEDS, truth):
                    found = drawn(net, part, seed)
                    np.testing.assert_allclose(found, expected, 1e-5, 1e-5, err_msg=f"{mesh}, {mode}, {seed}")


LAYERS, WIDTH, ROWS, STEPS = 4, 8, 16, 2


class Layer(nn.Cell):
    """Dropout twice by one Cell; those of one layer are not those of another."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(WIDTH, WIDTH)
        self.drop = nn.Dropout(p=0.25)

    def construct(self, x):
        return self.drop(x + self.drop(ops.tanh(self.dense(x))))


class Dropped(nn.Cell):
    """Some of the layers, and behind the last one the loss."""

    def __init__(self, stage_index=0, stage_num=1):
        super().__init__()
        numbers = np.split(np.arange(LAYERS), stage_num)[stage_index]
        self.layers = nn.CellDict([(str(number), Layer()) for number in numbers])
        self.is_last = stage_index == stage_num - 1

    def construct(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return ops.square(x).mean() * 0.1 if self.is_last else x


def dropped(*at, recomputed=False, **options):
    """A stage on this rank alone; its weights are those of one card."""
    with ms.DeviceCtx("meta"):
        net = Dropped(*at).set_train()
    shard(net, DeviceMesh((1,), ("tp",), (world().rank,)), seed=1, **options)
    return recompute(net, full=True) if recomputed else net


def rows_of(step, *cut):
    """The rows of a step: of shape (runs, replicas, micro-batches, rows) a part."""
    x = np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return x.reshape(*cut, -1, WIDTH)


@once
def dropped_on_one_card():
    """What `train` gives for whole batches."""
    net = dropped()
    step = ms.value_and_grad(net, None, net.trainable_params())
    ms.manual_seed(7)

    def gradients_of(number):
        loss, gradients = step(Tensor(rows_of(number)))
        return loss, [gradients]

    return train(gradients_of, [net.trainable_params()], STEPS)


def compare(losses, gradients_of, groups, what):
    """Losses, which `gradients_of` a step's number adds to, gradients and parameters are those of one card."""
    expected = dropped_on_one_card()
    ms.manual_seed(7)
    found = train(gradients_of, groups, STEPS)
    assert_alike(found, expected, what)
    np.testing.assert_allclose(losses, [loss for loss, _ in expected[0]], 1e-6, err_msg=what)


@on_ranks(2)
def case_ranks_with_batches_of_their_own_draw_as_one_card(ways=(("level1", {"recomputed": True}),)):
    """`hsdp()` of a Cell on this rank: two micro-steps, recomputed or eager; an evaluation draws nothing for them."""
    mesh, place = init_device_mesh((2,), ("dp",)), world().rank
    for level, options in ways:
        net = hsdp(dropped(**options), 2, 0, level, 2, mesh=mesh)
        gradient_of, losses = value_and_grad(net), []

        def gradients_of(number, net=net, gradient_of=gradient_of, losses=losses):
            parts = [gradient_of(Tensor(rows)) for rows in rows_of(number, 2, 2)[:, place]]
            net.set_train(False)(Tensor(rows_of(number)))
            net.set_train()
            losses.append(np.mean([*gather_values(mesh, [float(loss) for loss, _ in parts]).values()]))
            return None, [parts[-1][1]]

        compare(losses, gradients_of, [net.trainable_params()], level)


def compare_stages(kind, runs=1, replicas=1, compiled=False, recomputed=False):
    """Runs of a pipeline, whose ranks may have batches of their own, are one card's steps."""
    mesh = init_device_mesh((2, replicas), ("pp", "dp"))
    (rank,), (place,) = (mesh.coordinate(world().rank, (axis,)) for axis in ("pp", "dp"))
    options = {"accumulate_grad_step": runs, "mesh": mesh.sub_mesh(("dp",), world().rank)}

    def made(*at):
        return hsdp(dropped(*at, recomputed=recomputed), replicas, 0, **options)

    count, chunks = ROWS // runs // replicas // 2, 1 if kind is Schedule1F1B else 2
    schedule, losses = schedule_of(kind, count, chunks, mesh, rank, made, compiled, share_outputs=True), []

    def gradients_of(number):
        for stage in schedule.stages:
            stage.zero_gradients()
        parts = [float(schedule.run(Tensor(rows))) for rows in rows_of(number, runs, replicas)[:, place]]
        schedule.evaluate(Tensor(rows_of(number)))
        losses.append(np.mean([*gather_values(mesh, parts).values()]))
        return None, [stage.gradients for stage in schedule.stages]

    compare(losses, gradients_of, [stage.parameters for stage in schedule.stages], f"{kind.__name__}, {runs=}")


@on_ranks(2)
def case_stages_draw_as_one_card():
    """Whatever the order of micro-batches, recomputed."""
    compare_stages(ScheduleZBV, runs=2, recomputed=True)


@on_ranks(nightly=(2,))
def case_draws_in_other_ways_are_those_of_one_card():
    case_ranks_with_batches_of_their_own_draw_as_one_card([("level3", {"mode": "eager"})])
    compare_stages(Schedule1F1B, compiled=True)


@on_ranks(nightly=(4,))
def case_stages_of_ranks_with_batches_of_their_own_draw_as_one_card():
    """Two runs, two ranks for a stage, two micro-batches, of two rows."""
    compare_stages(ScheduleZBV, runs=2, replicas=2)
