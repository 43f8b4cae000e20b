"""The layers on one card: against NumPy and MindSpore's own, in PyNative and under jit, forward and gradient."""

from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindformers_core.layout import bind_layout, layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.tensor_parallel import layers

RNG = np.random.default_rng(5)
SEQUENCE_PARALLEL = SimpleNamespace(sequence_parallel=True)


def random_tensor(*shape):
    return Tensor(RNG.normal(size=shape).astype(np.float32))


def both_modes(cell, *inputs):
    """Gradients of the squared output by input (if a float) and parameters, once found the same in both modes."""
    weights = cell.trainable_params()
    has_floats = inputs[0].dtype == ms.float32

    def squared(*args):
        return (cell(*args) ** 2).sum()

    run = ms.value_and_grad(squared, 0 if has_floats else None, weights)

    @ms.jit
    def compiled(*args):
        return run(*args)

    (loss, gradients), (loss_jit, gradients_jit) = run(*inputs), compiled(*inputs)
    np.testing.assert_allclose(loss.asnumpy(), loss_jit.asnumpy(), rtol=1e-5)
    flat, flat_jit = ([g[0], *g[1]] if has_floats else g for g in (gradients, gradients_jit))
    for eager, graph in zip(flat, flat_jit):
        np.testing.assert_allclose(eager.asnumpy(), graph.asnumpy(), rtol=1e-4, atol=1e-5)
    return [gradient.asnumpy() for gradient in flat]


@pytest.mark.parametrize("kind", [layers.ColumnParallelLinear, layers.RowParallelLinear])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(kind, has_bias):
    cell = kind(6, 4, has_bias=has_bias, bias_init="normal")
    x, weight = random_tensor(2, 3, 6), cell.weight.asnumpy()
    bias = cell.bias.asnumpy() if has_bias else 0.0
    expected = x.asnumpy() @ weight.T + bias
    np.testing.assert_allclose(cell(x).asnumpy(), expected, rtol=1e-5, atol=1e-6)
    by_x, by_weight, *by_bias = both_modes(cell, x)
    np.testing.assert_allclose(by_x, 2 * expected @ weight, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(by_weight, 2 * np.einsum("bso,bsi->oi", expected, x.asnumpy()), rtol=1e-4, atol=1e-5)
    assert len(by_bias) == has_bias
    for gradient in by_bias:
        np.testing.assert_allclose(gradient, 2 * expected.sum((0, 1)), rtol=1e-4, atol=1e-5)


def test_embedding():
    cell = layers.VocabParallelEmbedding(10, 4)
    ids = Tensor(RNG.integers(0, 10, (2, 5)).astype(np.int32))
    np.testing.assert_array_equal(cell(ids).asnumpy(), cell.weight.asnumpy()[ids.asnumpy()])
    (by_weight,) = both_modes(cell, ids)
    counts = np.bincount(ids.asnumpy().ravel(), minlength=10)[:, None]
    np.testing.assert_allclose(by_weight, 2 * counts * cell.weight.asnumpy(), rtol=1e-4, atol=1e-7)


def test_rms_norm():
    cell, x = layers.RMSNorm(8, eps=1e-3), random_tensor(2, 3, 8)
    cell.weight.set_data(random_tensor(8))
    root = np.sqrt((x.asnumpy() ** 2).mean(-1, keepdims=True) + 1e-3)
    np.testing.assert_allclose(cell(x).asnumpy(), x.asnumpy() / root * cell.weight.asnumpy(), rtol=1e-5, atol=1e-6)
    both_modes(cell, x)


def test_layer_norm():
    cell, theirs, x = layers.LayerNorm(8, eps=1e-3), nn.LayerNorm((8,), epsilon=1e-3), random_tensor(2, 3, 8)
    for mine, other in ((cell.weight, theirs.gamma), (cell.bias, theirs.beta)):
        mine.set_data(random_tensor(8))
        other.set_data(Tensor(mine.asnumpy()))
    np.testing.assert_allclose(cell(x).asnumpy(), theirs(x).asnumpy(), rtol=1e-5, atol=1e-5)
    for mine, other in zip(both_modes(cell, x), both_modes(theirs, x)):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [layers.RMSNorm, layers.LayerNorm])
def test_norms_of_half_precision_compute_in_float32(kind):
    """The mean of squares of 300 is beyond float16's largest number."""
    x = Tensor(np.array([[300.0, -300.0, 300.0, -300.0]], np.float16))
    y = kind(4, dtype=ms.float16)(x)
    assert y.dtype == ms.float16
    np.testing.assert_allclose(y.asnumpy(), [[1, -1, 1, -1]], rtol=2e-3)


@pytest.mark.parametrize("ignored", [0, 4, 9])
def test_cross_entropy_equals_mindspore(ignored):
    logits = Tensor((10 * RNG.normal(size=(2, 5, 7))).astype(np.float32))
    labels = RNG.integers(0, 7, (2, 5)).astype(np.int32)
    labels.ravel()[RNG.permutation(10)[:ignored]] = -100
    labels = Tensor(labels)
    cell = layers.VocabParallelCrossEntropy()

    def theirs(logits, labels):
        return ops.cross_entropy(logits.reshape(-1, 7), labels.reshape(-1), ignore_index=-100)

    @ms.jit
    def compiled(logits, labels):
        return ms.value_and_grad(cell, 0)(logits, labels)

    expected, expected_gradient = ms.value_and_grad(theirs, 0)(logits, labels)
    for loss, gradient in (ms.value_and_grad(cell, 0)(logits, labels), compiled(logits, labels)):
        np.testing.assert_allclose(loss.asnumpy(), expected.asnumpy(), rtol=1e-5)
        np.testing.assert_allclose(gradient.asnumpy(), expected_gradient.asnumpy(), rtol=1e-4, atol=1e-7)


def test_cross_entropy_of_large_logits_and_of_nothing():
    cell, labels = layers.VocabParallelCrossEntropy(ignore_index=-1), Tensor(np.array([[0, -1]], np.int64))
    logits = Tensor(np.array([[[3e4, 0.0], [5.0, 5.0]]], np.float16))
    loss = cell(logits, labels)
    assert loss.dtype == ms.float32 and loss.asnumpy() == 0
    assert np.isnan(cell(logits, Tensor(np.array([[-1, -1]], np.int64))).asnumpy())


HOOKED = [
    layers.ColumnParallelLinear(4, 4),
    layers.ColumnParallelLinear(4, 4, gather_output=True),
    layers.RowParallelLinear(4, 4),
    layers.RowParallelLinear(4, 4, reduce_output=False),
    layers.VocabParallelEmbedding(4, 4),
    layers.VocabParallelCrossEntropy(),
    layers.RMSNorm(4),
    layers.LayerNorm(4),
]


@pytest.mark.parametrize("config", [None, SEQUENCE_PARALLEL], ids=["plain", "sequence parallel"])
@pytest.mark.parametrize("axes", [("tp",), ("dp", "tp"), ("dp", "cp", "tp")], ids="_".join)
@pytest.mark.parametrize("cell", HOOKED, ids=lambda cell: type(cell).__name__)
def test_hooks_fit_any_mesh_that_has_tp(cell, axes, config):
    mesh = DeviceMesh((2,) * len(axes), axes)
    given, out, weights = cell.shard(config)
    for declared in (given if isinstance(given, dict) else {"input": given}).values():
        assert declared is None or bind_layout(declared, mesh, 3).ndim == 3
    ndim = 0 if isinstance(cell, layers.VocabParallelCrossEntropy) else 3
    assert out is None or bind_layout(out, mesh, ndim).ndim == ndim
    declared = weights if isinstance(weights, dict) else {"weight": weights}
    for name, parameter in cell.parameters_and_names():
        bind_layout(declared[name], mesh, parameter.ndim).local_shape(parameter.shape)


def test_sequence_parallel_hooks():
    whole, sharded, gathered = layout(..., None), layout(..., ("tp",), None), layout(..., None, None)
    column, row = layers.ColumnParallelLinear(4, 4), layers.RowParallelLinear(4, 4)
    norm, embedding = layers.RMSNorm(4), layers.VocabParallelEmbedding(4, 4)
    assert (norm.shard(None)[0], norm.shard(SEQUENCE_PARALLEL)[0]) == (whole, sharded)
    assert (column.shard(None)[0], column.shard(SEQUENCE_PARALLEL)[0]) == (whole, gathered)
    assert (row.shard(None)[1], row.shard(SEQUENCE_PARALLEL)[1]) == (whole, sharded)
    assert (embedding.shard(None)[1], embedding.shard(SEQUENCE_PARALLEL)[1]) == (whole, sharded)
    for also, between in ((False, ("cp",)), (True, ("cp", "tp"))):  # each part of the sequence over tp, too
        both = SimpleNamespace(sequence_axes="cp", sequence_parallel=also)
        assert (row.shard(both)[1], column.shard(both)[0]) == (layout(..., between, None), layout(..., ("cp",), None))
