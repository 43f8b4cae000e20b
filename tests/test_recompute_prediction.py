"""What is kept for the backward pass, said ahead: the bytes that are measured, for models and random programs."""

import sys

import numpy as np
import pytest
from mindspore import Tensor, nn
from models import EXAMPLES, axes_of
from support.captured_models import MODELS
from support.launch import ROOT
from support.nightly import daily, seeds
from support.saved_tensors import constants_of, measured, saved_bytes, tensors_in

from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication.raw import RawCollective
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import shard

sys.path.append(str(ROOT / "tests" / "ranks"))
from random_cells import random_cell  # noqa: E402

WITHOUT_RULE = ("batch norm",)


@pytest.fixture
def four_ranks(monkeypatch, rank_0_of_4):
    """Rank 0 of 4, where nothing is sent, but results are tensors of their own, as those of real collectives are."""
    reduce_scatter = RawCollective.reduce_scatter
    monkeypatch.setattr(RawCollective, "all_reduce", lambda self, x, op: x + 0)
    monkeypatch.setattr(RawCollective, "reduce_scatter", lambda *arguments: reduce_scatter(*arguments) + 0)


def measured_and_program(net, args, named):
    """Bytes that a sharded Cell keeps, and the program that it ran."""
    net(*args, **named)
    (program,) = tree_of(net).programs.values()
    exclude = [*nn.Cell.get_parameters(net), *constants_of(program), *tensors_in((args, named))]

    def run(*given):
        return net(*given[: len(args)], **dict(zip(named, given[len(args) :])))

    return measured(run, *args, *named.values(), exclude=exclude), program


def example(name, mesh):
    """A sharded model, and its inputs."""
    if name not in EXAMPLES:
        net, inputs = MODELS[name]()
        return shard(net.set_train(), mesh), *inputs(1)
    found, axes = EXAMPLES[name], axes_of(mesh)
    net = shard(found.make().set_train(), mesh, config=found.config(axes), plan=found.plan(axes))
    return net, *found.inputs(1)


def assert_foretold(name, mesh):
    found, program = measured_and_program(*example(name, mesh))
    assert saved_bytes(program.plan, algorithm=algorithm_of) == found


NAMES = [name for name in {**EXAMPLES, **MODELS} if name not in WITHOUT_RULE]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", daily(NAMES[1::2], NAMES))
def test_models_on_one_rank(name):
    assert_foretold(name, init_device_mesh((1, 1), ("dp", "tp")))


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("name", daily(NAMES[::2], NAMES))
def test_models_on_four_ranks(name):
    assert_foretold(name, init_device_mesh((2, 2), ("dp", "tp")))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("layers", [1, 3])
def test_llama_with_inputs_that_are_closed_over(layers):
    """Gradients don't flow back to what the differentiated function takes from around it."""
    config = LlamaConfig(hidden_size=64, intermediate_size=192, num_hidden_layers=layers, num_attention_heads=4,
                         vocab_size=128, max_position_embeddings=32)  # fmt: skip
    net = shard(LlamaForCausalLM(config).set_train(), init_device_mesh((1,), ("tp",)))
    draw = np.random.default_rng(1)
    ids, labels = (Tensor(draw.integers(0, 128, (2, 32)).astype(np.int32)) for _ in range(2))
    passed, program = measured_and_program(net, (ids, labels), {})
    fresh = [Tensor(one.asnumpy()) for one in (ids, labels)]
    closed = measured(lambda: net(*fresh), exclude=[*fresh, *net.trainable_params(), *constants_of(program)])
    assert saved_bytes(program.plan) == passed
    assert saved_bytes(program.plan, arguments_need=False) == closed < passed


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("seed", seeds(12, 40))
def test_random_programs(seed):
    drawn = random_cell(seed)
    net = shard(drawn.make().set_train(), init_device_mesh((1,), ("tp",)))
    found, program = measured_and_program(net, list(map(Tensor, drawn.inputs)), {})
    assert saved_bytes(program.plan) == found
