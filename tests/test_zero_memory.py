"""`memory_report()` without ranks: the ZeRO paper's table, what `hsdp()` does in a dry run, memory given back."""

import numpy as np
import psutil
import pytest
from mindspore import DeviceCtx, Parameter, Tensor, int32, mint, nn, ops
from support.nightly import daily

from mindformers_core.communication import init_distributed, shutdown
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.recipe.sections import Parallelism
from mindformers_core.tensor_parallel import explain, shard
from mindformers_core.zero import MixedPrecision, hsdp, memory_report
from mindformers_core.zero.meter import MemoryMeter
from mindformers_core.zero.sharded_parameter import allocate_storage, free_storage

PAPER = MixedPrecision(parameter="float32", compute="float16", gradient="float16")
SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
MODEL = LlamaConfig(**SIZES, num_hidden_layers=32, vocab_size=62976, dtype="float16", tie_word_embeddings=False)


@pytest.fixture
def mesh_of_64():
    shutdown()
    init_distributed("fake", world_size=64, rank=0)
    yield init_device_mesh((64, 1), ("dp", "tp"))
    shutdown()


def dry_cell(mesh, *arguments, **options):
    with DeviceCtx("meta"):
        cell = LlamaForCausalLM(MODEL)
    return hsdp(shard(cell, mesh, Parallelism()), *arguments, mixed_precision=PAPER, **options)


TABLE = [(64, "level2", 16.6), (1, "level1", 120), (64, "level1", 31.4)]


@pytest.mark.parametrize(("shard_size", "level", "gigabytes"), daily(TABLE[:1], TABLE))
def test_the_papers_table(mesh_of_64, shard_size, level, gigabytes):
    """Rajbhandari et al. 2020, figure 1: 7.5e9 parameters in mixed precision with Adam, 64 ranks."""
    report = memory_report(dry_cell(mesh_of_64, shard_size, 64, level))
    assert sum(plan.size for plan in report.step.plans) == pytest.approx(7.5e9, rel=1e-3)
    assert round(report.states / 1e9, 0 if gigabytes == 120 else 1) == gigabytes
    assert not report.measured


def test_a_dry_run_shows_buckets_and_calls_the_cell(mesh_of_64):
    """At level 3, whose units are gathered around calls: nothing is allocated."""
    cell = dry_cell(mesh_of_64, 64, 64, "level3")
    with DeviceCtx("meta"):
        ids = mint.zeros((1, 128), dtype=int32)
        cell(ids, ids)
    said = explain(cell)
    assert "Under hsdp(), level3: optimizer state, gradients and weights in 64 parts over axis 'dp'." in said
    assert "model.norm.weight  float16 [4096], 8.0 KiB: 8 KB, not more than the threshold of 64 KB" in said
    layer = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert "all_gather of model.layers.31, float16, " in said
    report = memory_report(cell)
    assert round(report.states / 1e9, 1) == 1.9, "the last figure of the paper's table"
    assert report.computed["pass"].passing >= layer
    assert sum(bucket.size for bucket in report.step.gathers) == sum(p.size for p in report.step.plans if p.dim == 0)
    assert "optimizer's step" in str(report)


def test_tensors_are_counted_until_nobody_has_them():
    meter = MemoryMeter()
    meter.begin("pass")
    tensor = meter.watch("gradients", Tensor(np.zeros((4, 8), np.float32)) + 1)
    view = meter.watch("buckets", tensor.reshape(-1))
    assert meter.now["gradients"] == 128 and meter.now["buckets"] == 0
    del tensor
    assert meter.now["gradients"] == 128
    other = meter.watch("buckets", view + 1)
    del view
    assert meter.now == {"gradients": 0, "buckets": 128}
    meter.begin("update")
    del other
    assert meter.peaks == {"pass": {"gradients": 128, "buckets": 128}, "update": {"gradients": 0, "buckets": 128}}


def test_memory_is_given_back_and_taken_again():
    """64 MB; the tensor keeps its address, so that compiled functions find it."""
    tensor, values = Parameter(mint.zeros((2**24,))), mint.ones((2**24,))
    address, process = tensor.untyped_storage().data_ptr(), psutil.Process()
    for _ in range(3):
        before = process.memory_info().rss
        free_storage(tensor)
        assert process.memory_info().rss < before - 60 * 2**20
        allocate_storage(tensor, 2**26)
        ops.assign(tensor, values)
        assert tensor.untyped_storage().data_ptr() == address
        np.testing.assert_array_equal(tensor.asnumpy(), 1)


def test_an_optimizer_that_is_none(mesh_of_64):
    cell = dry_cell(mesh_of_64)
    with pytest.raises(TypeError, match="should be an optimizer"):
        memory_report(cell, [])
    with pytest.raises(ValueError, match="isn't under hsdp"):
        memory_report(nn.Dense(4, 4))
