"""Linear layers in simulated float8: rounding, the programs of all ranks, and layers by a spec as the RFC builds them.

`tests/ranks/case_own_model.py` trains `TOWER` on meshes.
"""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.documents import code_blocks
from support.launch import ROOT

from mindformers_core import explain, init_device_mesh, jit, shard, verify
from mindformers_core.commands.command_line import main
from mindformers_core.communication.world import rank_of
from mindformers_core.layout import layout
from mindformers_core.models import LayerRange, LlamaConfig, LlamaForCausalLM, ModelSpec, ModuleSpec, build_module
from mindformers_core.operators import tensor_meta
from mindformers_core.tensor_parallel import ColumnParallelLinear, Fp8Policy, get_fp8_context
from mindformers_core.tensor_parallel.fp8 import FORMATS, fp8_dense, simulated


def page(name):
    """The module of that name in docs/models.md."""
    (text,) = [block for block in code_blocks(ROOT / "docs" / "models.md", "python") if block.startswith(f"# {name}")]
    module = sys.modules.setdefault(name, ModuleType(name))
    exec(text, vars(module))
    return module


layers = page("my_layers")


@dataclass(frozen=True)
class TowerConfig:
    """In float64 the order of a sum doesn't decide to which number of float8 its result is rounded."""

    hidden_size: int = 16
    intermediate_size: int = 32
    num_hidden_layers: int = 4
    fp8: str | None = None
    wide: bool = True  # in float64


class Tower(nn.Cell):
    """Samples (rows, hidden_size), whose sizes differ a lot, and labels (rows,): the mean of losses of many sizes."""

    def __init__(self, config, layers=None):
        super().__init__()
        part = LayerRange(0, config.num_hidden_layers) if layers is None else layers
        self.is_last, self.dtype, self.layers = part.is_last, getattr(ms, dtype_of(config)), nn.CellDict()
        for number in range(part.offset, part.offset + part.count):
            with get_fp8_context(config, number, is_init=True):
                self.layers[str(number)] = layer_of(config, number + 1)

    def shard(self, config):
        batch = layout(config.batch_axes, ...)
        return {"samples": batch, "labels": batch}, None if self.is_last else batch, None

    def construct(self, samples, labels):
        x = ops.cast(samples, self.dtype)
        for layer in self.layers.values():
            x = layer(x)
        sizes = ops.pow(10.0, -ops.cast(labels, self.dtype))
        return ops.mean(ops.sum(ops.tanh(x) + 1.0, -1) * sizes) if self.is_last else x


class Spread:
    """An endless stream of samples whose sizes are 1 to 1e-6, and labels, powers of 0.1 by which they weigh."""

    def batch(self, first, count):
        draws = [np.random.default_rng((3, number)) for number in range(first, first + count)]
        samples = [draw.standard_normal(16) * 10.0 ** -draw.integers(0, 7) for draw in draws]
        return np.stack(samples).astype(np.float32), np.array([draw.integers(10) for draw in draws], np.int32)


def dtype_of(config):
    return "float64" if config.wide else "float32"


def layer_of(config, number):
    return layers.Layer(SimpleNamespace(**vars(config), dtype=dtype_of(config)), number)


LAYER = ModuleSpec(layers.Layer)
TOWER = ModelSpec(
    Tower,
    TowerConfig,
    inputs=("samples", "labels"),
    boundary=lambda config, batch, length: tensor_meta((batch, config.hidden_size), dtype_of(config)),
)


def open_spread(section, config, seed):
    """What `train_dataset.factory` names."""
    return Spread()


def codes(form):
    """All finite numbers of a format, of 8 bits each, that aren't negative, ascending."""
    bits, low, high = FORMATS[form]
    numbers = [mantissa * 2.0 ** (low - bits) for mantissa in range(2**bits)]
    numbers += [(1 + part / 2**bits) * 2.0**power for power in range(low, high + 1) for part in range(2**bits)]
    return np.array([each for each in numbers if each <= 1.75 * 2.0**high])


@pytest.mark.parametrize(("form", "count", "largest"), [("e4m3", 127, 448.0), ("e5m2", 124, 57344.0)])
def test_rounding_equals_a_search_in_all_codes(form, count, largest):
    """Every code, the middles between them (ties to even codes), their neighbours, and random numbers; and compiled."""
    table = codes(form)
    assert len(table) == count and table[-1] == largest
    middles = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(middles, np.float32(end)) for end in (0, np.inf)]
    random = np.exp2(np.random.default_rng(0).uniform(-20, np.log2(largest), 20_000)).astype(np.float32)
    x = np.concatenate([table.astype(np.float32), middles, *near, random])
    below = np.clip(np.searchsorted(table, x, side="right") - 1, 0, count - 2)
    gap = (x - table[below]) - (table[below + 1] - x)
    expected = table[below + ((gap > 0) | (gap == 0) & (below % 2 == 1))]
    x, expected = np.concatenate([x, -x]), np.concatenate([expected, -expected])
    run = ms.jit(simulated)
    for scale in (1.0, 2.0**-20, 2.0**30):
        given = Tensor((x * scale).astype(np.float32)), Tensor(np.float32(largest * scale)), form
        for function in (simulated, run) if scale == 1 else (simulated,):
            np.testing.assert_array_equal(function(*given).asnumpy(), (expected * scale).astype(np.float32))
    odd = Tensor(np.array([0.0, -1.0, np.nan, np.inf], np.float32))
    assert np.isnan(simulated(odd, Tensor(np.float32(1)), form).asnumpy()[2:]).tolist() == [True, False]
    assert np.isnan(simulated(odd, Tensor(np.float32(np.inf)), form).asnumpy()).all()
    assert not simulated(odd[:1], Tensor(np.float32(0)), form).asnumpy().any()


def test_gradients_pass_through_and_are_rounded():
    """Both products of the backward pass have the rounded gradient, and the rounded other factor."""
    rng = np.random.default_rng(1)
    x, weight, slope = (Tensor(rng.normal(size=size).astype(np.float32)) for size in ((6, 8), (4, 8), (6, 4)))
    near = {id(each): simulated(each, ops.amax(ops.abs(each)), form) for each, form in
            ((x, "e4m3"), (weight, "e4m3"), (slope, "e5m2"))}  # fmt: skip
    y, gradients = ms.value_and_grad(lambda x, w: (fp8_dense(x, w, "hybrid") * slope).sum(), (0, 1))(x, weight)
    rounded_x, rounded_weight, rounded_slope = (near[id(each)].asnumpy() for each in (x, weight, slope))
    np.testing.assert_allclose(y.asnumpy(), (rounded_x @ rounded_weight.T * slope.asnumpy()).sum(), 1e-5)
    np.testing.assert_allclose(gradients[0].asnumpy(), rounded_slope @ rounded_weight, 1e-5, 1e-6)
    np.testing.assert_allclose(gradients[1].asnumpy(), rounded_slope.T @ rounded_x, 1e-5, 1e-6)


class Uneven(nn.Cell):
    """A column- and a row-parallel product; rows, and with `sizes` their gradients, have very different sizes."""

    def __init__(self, fp8="hybrid"):
        super().__init__()
        with get_fp8_context(SimpleNamespace(fp8=fp8), is_init=True):
            self.layer = build_module(LAYER, SimpleNamespace(hidden_size=8, intermediate_size=16, dtype="float32"), 1)

    def shard(self, config):
        return {"x": layout("dp", None), "sizes": layout("dp", None)}, None, None

    def construct(self, x, sizes):
        return ops.sum(ops.tanh(self.layer(x)) * sizes)


ROWS = Tensor((np.random.default_rng(4).normal(size=(4, 8)) * [[1], [1e-2], [1e-4], [1e-6]]).astype(np.float32))
SIZES = Tensor(np.array([[1], [1e-4], [1e-9], [1e-12]], np.float32))
MESH = init_device_mesh((2, 2), ("dp", "tp"))


def test_every_rank_rounds_as_one_card():
    """The scale is that of the whole tensor: rows of other ranks, too small for it, vanish, and so do gradients."""
    check = verify(Uneven(), MESH, ROWS, SIZES)
    assert not check.faults and "no difference" in check.report()
    with rank_of(4, 0):
        told = explain(shard(Uneven(), MESH), *(tensor_meta((2, size), "float32") for size in (8, 1)))
    assert "all_reduce max over dp, 4 B" in told and "sliced dim 0 over dp, tp; backward: all_gather, 12 B" in told


@pytest.mark.usefixtures("one_rank")
def test_both_engines_and_compiled():
    net, mesh = Uneven(), init_device_mesh((1, 1), ("dp", "tp"))
    values = [parameter.value().copy() for parameter in net.trainable_params()]
    expected, slopes = ms.value_and_grad(net, None, net.trainable_params())(ROWS, SIZES)
    for mode, compiled in (("generated", False), ("generated", True), ("eager", False)):
        other = Uneven()
        for parameter, value in zip(other.trainable_params(), values):
            parameter.set_data(value)
        other = shard(other, mesh, mode=mode)
        gradient_of = ms.value_and_grad(other, None, other.trainable_params())
        loss, gradients = (jit(gradient_of) if compiled else gradient_of)(ROWS, SIZES)
        np.testing.assert_allclose(loss.asnumpy(), expected.asnumpy(), 1e-6, err_msg=mode)
        for found, slope in zip(gradients, slopes, strict=True):
            np.testing.assert_array_equal(found.asnumpy(), slope.asnumpy(), err_msg=mode)


SMALL = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 8, "vocab_size": 32, "intermediate_size": 16}


@pytest.mark.parametrize(("schedule", "last"), [("interleaved_1f1b", (0, 1)), ("zb_v", (1, 0))])
def test_the_rfcs_build_layer_runs_as_written(schedule, last):
    """Eight layers of other widths in two stages on each of two ranks: number, width and float8 of each."""
    specs = tuple({"intermediate_size": 8 * number} | ({"fp8": None} if number == 4 else {}) for number in range(1, 9))
    config = layers.BlockConfig(
        **SMALL, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, fp8="hybrid",
        pipeline_parallel_schedule=schedule, first_last_layers_bf16=True, heterogeneous_block_specs=specs,
    )  # fmt: skip
    found = []
    for rank, vp_stage in ((0, 0), (1, 0), *((rank, 1) for rank in last)):
        with rank_of(2, rank):
            block = layers.Block(config, LAYER, vp_stage)
        found += [(layer.up.weight.shape[0] // 8, layer.up.fp8, layer.down.fp8) for layer in block.layers]
    rounded = [None, "hybrid", "hybrid", None, "hybrid", "hybrid", "hybrid", None]
    assert found == [(number, fp8, fp8) for number, fp8 in enumerate(rounded, 1)]
    for vp_stage in (None, 2):
        with pytest.raises(ValueError, match=f"vp_stage: {vp_stage} should be from 0 to 1, of the stages of a rank"):
            layers.Block(config, LAYER, vp_stage)


def test_one_rank_has_all_layers_and_a_layer_may_ask_for_its_place():
    class Placed(layers.Layer):
        def __init__(self, config, layer_number, vp_stage, model_comm_pgs):
            super().__init__(config, layer_number)
            self.place = layer_number, vp_stage, model_comm_pgs

    with rank_of(1, 0):
        block = layers.Block(layers.BlockConfig(**SMALL), ModuleSpec(Placed), model_comm_pgs="groups")
    assert [layer.place for layer in block.layers] == [(number, None, "groups") for number in range(1, 9)]
    assert all(layer.up.fp8 is None for layer in block.layers)
    with pytest.raises(TypeError, match="layer_nummer"):
        build_module(LAYER, block.config, layer_nummer=1)


def test_a_device_fills_the_policy():
    """By its name in a recipe; `quantize` gets the largest number of the tensor, both ways."""
    page("my_kernels")
    x, slope = (Tensor(np.array([[8.0, 1.4, 0.6]], np.float32)) for _ in range(2))
    unit = Tensor(np.eye(3, dtype=np.float32))
    y, gradient = ms.value_and_grad(lambda given: (fp8_dense(given, unit, "my_kernels:COARSE") * slope).sum())(x)
    np.testing.assert_allclose(y.asnumpy(), 8 * 8 + 1 * 1.4 + 1 * 0.6, 1e-6)
    np.testing.assert_allclose(gradient.asnumpy(), [[8, 1, 1]], 1e-6)


def test_llama_takes_its_layers_by_config():
    config = LlamaConfig(**SMALL | {"num_hidden_layers": 3}, fp8="hybrid", first_last_layers_bf16=True)
    net = LlamaForCausalLM(config)
    linear = {path: cell.fp8 for path, cell in net.cells_and_names() if isinstance(cell, ColumnParallelLinear)}
    assert {path for path, fp8 in linear.items() if fp8} == {
        f"model.layers.1.{name}_proj" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    }


def test_mistakes():
    def of(**config):
        return get_fp8_context(SimpleNamespace(**config), is_init=True)

    with pytest.raises(
        ValueError, match=r"fp8: 'hybird' should be one of e4m3, hybrid, .* \(did you mean 'hybrid'\?\)"
    ):
        of(fp8="hybird")
    with pytest.raises(ValueError, match="fp8: 'mindspore:Tensor' should be one of .* of an Fp8Policy"):
        of(fp8="mindspore:Tensor")
    with pytest.raises(ValueError, match="fp8_recipe: 'delayed' should be 'tensorwise'"):
        of(fp8="hybrid", fp8_recipe="delayed")
    with pytest.raises(ValueError, match="is_init=False.: linear layers multiply as they were built"):
        get_fp8_context(SimpleNamespace(fp8="hybrid"))
    with get_fp8_context(SimpleNamespace(fp8=None), 3):
        assert ColumnParallelLinear(2, 2).fp8 is None
    assert Fp8Policy() != Fp8Policy(backward="e4m3")


@pytest.mark.nightly
@pytest.mark.parametrize("config", ["zero", "pp"])
def test_llamas_recipes_are_verified(config, capsys):
    given = [str(ROOT / "configs" / f"llama_tiny_{config}.yaml"), "model.fp8=hybrid", "model.num_hidden_layers=2"]
    assert main(["verify", "--config", *given, "parallelism.sequence_parallel=true"]) == 0
    assert "no difference" in capsys.readouterr().out
