"""What is kept for the backward pass, said ahead: the bytes that are measured, for models and random programs."""

import numpy as np
import pytest
from captured_models import MODELS
from mindspore import Parameter, Tensor, nn, ops
from models import EXAMPLES, axes_of
from saved_tensors import measured

from mindformers_core.analysis.prediction import saved_bytes
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication.raw import RawCollective
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import shard

WITHOUT_RULE = ("batch norm",)


@pytest.fixture
def four_ranks(monkeypatch, rank_0_of_4):
    """Rank 0 of 4, where nothing is sent, but results are tensors of their own, as those of real collectives are."""
    reduce_scatter = RawCollective.reduce_scatter
    monkeypatch.setattr(RawCollective, "all_reduce", lambda self, x, op: x + 0)
    monkeypatch.setattr(RawCollective, "reduce_scatter", lambda *arguments: reduce_scatter(*arguments) + 0)


def tensors_in(structure):
    if isinstance(structure, dict):
        structure = tuple(structure.values())
    if isinstance(structure, (tuple, list)):
        return [tensor for entry in structure for tensor in tensors_in(entry)]
    return [structure] if isinstance(structure, Tensor) else []


def constants_of(program):
    """What a program keeps of constants, which are there anyway."""
    found = [function.__globals__.items() for function in program.functions.values()]
    return [value for items in found for name, value in items if name.startswith("constant_")]


def measured_and_program(net, args, named):
    """Bytes that a sharded Cell keeps, and the program that it ran."""
    net(*args, **named)
    (program,) = tree_of(net).programs.values()
    exclude = [*nn.Cell.trainable_params(net), *constants_of(program), *tensors_in((args, named))]

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
    assert saved_bytes(program.frame, algorithm=algorithm_of) == found


NAMES = [name for name in {**EXAMPLES, **MODELS} if name not in WITHOUT_RULE]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", NAMES)
def test_models_on_one_rank(name):
    assert_foretold(name, init_device_mesh((1, 1), ("dp", "tp")))


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("name", NAMES)
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
    assert saved_bytes(program.frame) == passed
    assert saved_bytes(program.frame, arguments_need=False) == closed < passed


SIZE = 8
STEPS = {
    "add": lambda a, b, w: ops.add(a, b),
    "mul": lambda a, b, w: ops.mul(a, b),
    "square": lambda a, b, w: ops.mul(a, a),
    "exp": lambda a, b, w: ops.exp(ops.mul(a, 0.01)),
    "sin": lambda a, b, w: ops.sin(a),
    "div": lambda a, b, w: ops.div(a, ops.add(ops.square(b), 1.0)),
    "transpose": lambda a, b, w: ops.transpose(a, (1, 0)),
    "reshape": lambda a, b, w: ops.reshape(ops.reshape(a, (4, 16)), (SIZE, SIZE)),
    "split": lambda a, b, w: ops.cat(ops.split(a, 4, 1)[::-1], 1),
    "halves": lambda a, b, w: ops.tile(ops.split(a, 4, 0)[1], (2, 1)),
    "broadcast": lambda a, b, w: ops.mul(b, ops.broadcast_to(ops.sum(a, 0, True), (SIZE, SIZE))),
    "weight": lambda a, b, w: ops.mul(a, w),
    "matmul": lambda a, b, w: ops.matmul(a, ops.transpose(w, (1, 0))),
    "softmax": lambda a, b, w: ops.softmax(a, -1),
    "stop": lambda a, b, w: ops.mul(ops.stop_gradient(a), b),
    "mask": lambda a, b, w: ops.mul(b, ops.cast(ops.greater(a, 0.0), a.dtype)),
    "norm": lambda a, b, w: ops.mul(a, ops.rsqrt(ops.add(ops.mean(ops.square(a), -1, True), 1e-3))),
}


class Random(nn.Cell):
    """Random operators on square tensors, and calls of the same."""

    def __init__(self, random, depth):
        super().__init__()
        self.weight = Parameter(Tensor(random.normal(size=(SIZE, SIZE)).astype(np.float32)))
        self.inner = nn.CellList([Random(random, depth - 1)] if depth else [])
        kinds = [*STEPS, *["call"] * (3 * depth)]
        self.steps = [
            (kinds[random.integers(len(kinds))], *map(int, random.integers(0, 99, 2)))
            for _ in range(random.integers(3, 12))
        ]

    def construct(self, x, y):
        pool = [x, y]
        for kind, first, second in self.steps:
            a, b = pool[first % len(pool)], pool[-1 - second % len(pool)]
            pool.append(self.inner[0](a, b) if kind == "call" else STEPS[kind](a, b, self.weight))
        return pool[-1] + ops.mul(pool[-2], self.weight)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed):
    random = np.random.default_rng(seed)
    net = shard(Random(random, int(random.integers(3))).set_train(), init_device_mesh((1,), ("tp",)))
    inputs = [Tensor(random.normal(size=(SIZE, SIZE)).astype(np.float32)) for _ in range(2)]
    found, program = measured_and_program(net, inputs, {})
    assert saved_bytes(program.frame) == found
