"""`PipelineCell`: marks on the Cells of a model make a pipeline, with the numbers of one card."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.launch import on_ranks
from truth import once

from mindformers_core.communication import world
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.pipeline import PipelineCell, ScheduleGPipe

ROWS, WIDTH = 8, 6


class Loss(nn.Cell):
    """Takes the target beside the result of the Cell before."""

    def construct(self, y, target, scale):
        return ops.mean(ops.square(y * scale - target))


class Net(nn.Cell):
    """A chain, or what isn't one in some `way`."""

    def __init__(self, way=""):
        super().__init__()
        self.first, self.way = nn.SequentialCell(nn.Dense(WIDTH, WIDTH), nn.Tanh()), way
        self.layers = nn.CellList([nn.Dense(WIDTH, WIDTH) for _ in range(2)])
        self.loss = Loss()
        random = np.random.default_rng(1)
        for parameter in self.get_parameters():
            parameter.set_data(Tensor(random.normal(size=parameter.shape).astype(np.float32)))

    def construct(self, x, target, scale):
        y = first = self.first(x)
        y = y * 2 if self.way == "an operator" else y
        for each in self.layers:
            y = each(y)
        loss = self.loss(y, {"a skip": first, "the first": x}.get(self.way, target), scale)
        return (loss, y) if self.way == "two results" else loss


def marked(net):
    net.first.pipeline_stage, net.layers[0].pipeline_stage = 0, 0
    net.layers[1].pipeline_stage = 1
    return net


def batch():
    x, target = np.random.default_rng(2).normal(size=(2, ROWS, WIDTH)).astype(np.float32)
    return Tensor(x), Tensor(target), Tensor(np.linspace(0.5, 1.5, ROWS).astype(np.float32)[:, None])


@once
def alone():
    net = Net()
    loss, gradients = ms.value_and_grad(net, None, net.trainable_params())(*batch())
    return loss.asnumpy(), {p.name: g.asnumpy() for p, g in zip(net.trainable_params(), gradients)}


def compare(pipeline, inputs, what):
    loss, gradients = alone()
    for _ in range(2):  # each call has the gradients of its own
        np.testing.assert_allclose(pipeline(*inputs).asnumpy(), loss, 1e-5, err_msg=what)
    own = dict(zip([parameter.name for parameter in pipeline.trainable_params()], pipeline.gradients, strict=True))
    assert own and set(own) < set(gradients)
    for name, gradient in own.items():
        np.testing.assert_allclose(gradient.asnumpy(), gradients[name], 1e-5, 1e-6, err_msg=f"{what}: {name}")


@on_ranks(2)
def case_marked_cells_are_a_pipeline():
    """In PyNative, compiled; an operator that belongs to no stage is an error on all ranks."""
    compare(PipelineCell(marked(Net()), 4, {"loss": 1}), batch(), "PyNative")
    compare(PipelineCell(marked(Net()), 2, {"loss": 1}, schedule=ScheduleGPipe, compiled=True), batch(), "compiled")
    for way, error in (
        ("an operator", "operator 'Muls' is in no Cell with a pipeline_stage"),
        ("a skip", "Cell 'loss' should take the result of the Cell before first"),
        ("the first", "Cell 'loss' should take .* arguments of the model other than the first one"),
        ("two results", r"the root Cell \(Net\) should return what its last Cell"),
    ):
        with pytest.raises(ValueError, match=error):
            PipelineCell(marked(Net(way)), 4, {"loss": 1})(*batch())
    for config, error in (({"los": 1}, "no Cell by 'los'.*'loss'"), ({"loss": 2}, r"\[0, 1, 2\], and the 2 ranks")):
        with pytest.raises(ValueError, match=error):
            PipelineCell(marked(Net()), 4, config)


@on_ranks(nightly=(4,))
def case_marked_cells_are_a_pipeline_of_data_parallel_stages():
    mesh = init_device_mesh((2, 2), ("pp", "dp"))
    rows = layout("dp").bind(mesh, 2)
    inputs = [Tensor(each.asnumpy()[rows.local_slices(each.shape, world().rank)]) for each in batch()]
    plan = {"": {"input": {"x": layout("dp"), "target": layout("dp"), "scale": layout("dp")}}}
    compare(PipelineCell(marked(Net()), 2, {"loss": 1}, mesh=mesh, plan=plan), inputs, "dp 2")
