"""Operators that are computed as others: what one card computes, or NumPy where CPU has no kernel."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.small_cells import cell_of

from mindformers_core import shard, verify
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh, init_device_mesh

MESH = DeviceMesh((2, 2), ("dp", "tp"))


def numbers(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def outputs(make, *inputs, cut):
    """The results of a sharded Cell, which all ranks have their parts of."""
    check = verify(lambda: shard(make(), MESH, plan={"": {"input": {"x": layout(*cut)}}}), MESH, *map(Tensor, inputs))
    assert not check.faults, check.report()
    return list(check.truth.outputs.values())[0], check.truth.written


def seeded(cell):
    for number, parameter in enumerate(cell.get_parameters()):
        parameter.set_data(Tensor(np.random.default_rng(number).normal(size=parameter.shape).astype(np.float32)))
    return cell


@pytest.mark.parametrize("bias", [True, False])
def test_a_recurrent_layer_is_that_of_one_card(bias):
    """`LSTM`'s own operator on CPU: results and gradients, where the batch, the steps or the elements are cut."""
    x, h, c = numbers(2, 4, 8), numbers(1, 4, 6), numbers(1, 4, 6) * 2

    def make():
        return seeded(cell_of(lambda self, x, h, c: self.lstm(x, (h, c)), lstm=nn.LSTM(8, 6, has_bias=bias)))

    y, (state, cell) = make()(*map(Tensor, (x, h, c)))
    for cut in ((None, "dp"), ("dp", None, "tp"))[: 1 + bias]:
        found, _ = outputs(make, x, h, c, cut=cut)
        for one, other in zip(found, (y, state, cell), strict=True):
            np.testing.assert_allclose(one, other.asnumpy(), 1e-4, 1e-5)


@pytest.mark.usefixtures("one_rank")
def test_gradients_of_a_recurrent_layer_are_those_of_one_card():
    def slopes(change):
        net = change(seeded(cell_of(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(8, 6, num_layers=2))))
        step = ms.grad(lambda x: ops.square(net(x)).sum(), None, net.trainable_params())
        return [gradient.asnumpy() for gradient in step(Tensor(numbers(3, 2, 8)))]

    for one, other in zip(slopes(lambda net: shard(net, init_device_mesh((1,), ("dp",)))), slopes(lambda net: net)):
        np.testing.assert_allclose(one, other, 1e-4, 1e-4)


@pytest.mark.parametrize("cut", [("dp", "tp"), (None, None, "dp")], ids=str)
def test_an_instance_norm_is_a_group_norm_of_single_channels(cut):
    """Running statistics are the means, over the batch, of those that each instance would give."""
    x, scale, bias, mean, variance = numbers(4, 2, 6), *(numbers(2) + shift for shift in (1, 0, 0, 3))

    def make():
        cell = nn.InstanceNorm1d(2, momentum=0.25)
        for parameter, value in zip((cell.gamma, cell.beta, cell.moving_mean, cell.moving_variance),
                                    (scale, bias, mean, variance), strict=True):  # fmt: skip
            parameter.set_data(Tensor(value))
        return cell

    found, written = outputs(make, x, cut=cut)
    center, spread = x.mean(2, keepdims=True), x.var(2, keepdims=True)
    expected = (x - center) / np.sqrt(spread + 1e-5) * scale[:, None] + bias[:, None]
    np.testing.assert_allclose(found[0], expected, 1e-4, 1e-5)
    (state,) = written.values()
    np.testing.assert_allclose(state["moving_mean"], 0.75 * mean + 0.25 * center.mean((0, 2)), 1e-5, 1e-6)
    np.testing.assert_allclose(
        state["moving_variance"], 0.75 * variance + 0.25 * spread.mean((0, 2)) * 6 / 5, 1e-5, 1e-6
    )


def test_rows_are_added_to_a_parameter():
    x, rows = numbers(4, 8), numbers(2, 8)

    def make():
        held = Parameter(Tensor(rows), name="held", requires_grad=False)
        return cell_of(lambda self, x: ops.index_add(self.held, Tensor([1, 1], ms.int32), x[:2], 0) * 2, held=held)

    found, written = outputs(make, x, cut=("dp", "tp"))
    expected = rows + np.stack([x[0] * 0, x[0] + x[1]])
    np.testing.assert_allclose(found[0], 2 * expected, 1e-5, 1e-6)
    np.testing.assert_allclose(next(iter(written.values()))["held"], expected, 1e-5, 1e-6)


def test_a_dot_of_matrices():
    """Whose shape the meta device doesn't tell."""
    x, y = numbers(4, 8), numbers(8, 4)
    found, _ = outputs(lambda: cell_of(lambda self, x, y: x.dot(y)), x, y, cut=("dp", "tp"))
    np.testing.assert_allclose(found[0], x @ y, 1e-5, 1e-5)
