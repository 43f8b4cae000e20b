"""A small model for pipelines, its stages, and what one card computes."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer
from truth import once

from mindformers_core.communication import world
from mindformers_core.layout import layout
from mindformers_core.pipeline import PipelineScheduleMulti, PipelineStage
from mindformers_core.pipeline.schedules.placement import PLACEMENTS
from mindformers_core.tensor_parallel import materialize, shard

LAYERS, WIDTH, WORDS, LENGTH, SEED = 8, 8, 16, 4, 3


class Block(nn.Cell):
    """A residual layer."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(WIDTH, WIDTH)

    def construct(self, x):
        return x + ops.tanh(self.dense(x))


class Model(nn.Cell):
    """An embedding that is the head, too, and layers: single-card code, written as the RFC's example is.

    Between layers go hidden states, the tokens (integers) and a sum for every row (one dim, float64).
    """

    def __init__(self):
        super().__init__()
        self.embedding = Parameter(initializer(Normal(0.5), (WORDS, WIDTH)), name="embedding")
        self.layers = nn.CellDict([(str(number), Block()) for number in range(LAYERS)])
        self.is_first = self.is_last = True
        self.total_dtype = ms.float64

    def shard(self, config=None):
        """Rows over dp, the layers' width over tp."""
        del config
        rows = {name: layout("dp") for name in ("x", "tokens", "total", "labels", "scale")}
        return rows, None if self.is_last else (layout("dp"),) * 3, None

    def construct(self, x, tokens=None, total=None, labels=None, scale=None):
        if self.is_first:
            tokens = x
            x = ops.gather(self.embedding, tokens, 0)
            total = ops.cast(x.mean((1, 2)), self.total_dtype)
        for layer in self.layers.values():
            x = layer(x) * scale
            total = total + ops.cast(x.mean((1, 2)), self.total_dtype)
        if not self.is_last:
            return x, tokens, total
        x = x + ops.cast(tokens.expand_dims(-1), ms.float32) / WORDS
        logits = ops.matmul(x, self.embedding.T).reshape((-1, WORDS))
        wanted = ops.cast(labels.reshape((-1, 1)), ms.float32) / WORDS  # a loss that is quickly planned and compiled
        loss = ops.square(logits - wanted).mean() + ops.cast(total.mean(), ms.float32)
        return loss, logits


def model_split_manual(model, stage_index, stage_num):
    """Take away from the whole model what other stages hold."""
    size = LAYERS // stage_num
    for number in range(LAYERS):
        if number // size != stage_index:
            del model.layers[str(number)]
    model.is_first, model.is_last = stage_index == 0, stage_index == stage_num - 1
    if not (model.is_first or model.is_last):
        del model.embedding
    return model


def part(stage_index=0, stage_num=1):
    """A stage's Cell with its initial values: those of one card."""
    with ms.DeviceCtx("meta"):
        model = model_split_manual(Model(), stage_index, stage_num)
    materialize(model, SEED)
    return model


def sharded_part(mesh):
    """A function that makes a stage's Cell on `mesh`, with the axes dp and tp."""

    def make(stage_index, stage_num):
        with ms.DeviceCtx("meta"):
            model = model_split_manual(Model(), stage_index, stage_num)
        model.total_dtype = ms.float32  # float64 can't be communicated in graphs on CPU
        plan = {"layers.*.dense": {"weight": {"weight": layout("tp", None), "bias": layout("tp")}}}
        return shard(model, mesh, plan=plan, seed=SEED)

    return make


def batch(rows, seed=0):
    """Tokens, and the keyword arguments of a batch."""
    random = np.random.default_rng(seed)
    tokens, labels = random.integers(0, WORDS, (2, rows, LENGTH)).astype(np.int32)
    scale = random.uniform(0.8, 1.0, (rows, 1, 1)).astype(np.float32)
    return Tensor(tokens), {"labels": Tensor(labels), "scale": Tensor(scale)}


def schedule_of(kind, micro_batch_num, chunk_num=1, mesh=None, rank=None, make=part, compiled=False, **options):
    """A schedule with this rank's stages, all that the rank of the pipeline holds."""
    rank_num = world().size if mesh is None else mesh.axis_size("pp")
    rank = world().rank if rank is None else rank
    ranks = PLACEMENTS[kind.placement](rank_num * chunk_num, rank_num)
    stages = [
        PipelineStage(make(index, len(ranks)), index, len(ranks), mesh=mesh, compiled=compiled, tied=("embedding",))
        for index in range(len(ranks))
        if ranks[index] == rank
    ]
    return kind(stages if issubclass(kind, PipelineScheduleMulti) else stages[0], micro_batch_num, **options)


def train(gradients_of, groups, steps=5):
    """Steps of Momentum: what every step gave, and the parameters at the end.

    Args:
        gradients_of: function of the step's number that gives the loss and the gradients, group by group.
        groups: tuples of Parameters.
        steps: how many.

    Returns:
        `[(loss, {path: gradient}), …]`, `{path: value}`, and for parameters that are cut `{path: slices}`; arrays.
    """
    optimizers = [nn.Momentum(list(group), 0.1, 0.9) for group in groups]
    rows = []
    for step in range(steps):
        loss, found = gradients_of(step)
        named = []
        for optimizer, group, gradients in zip(optimizers, groups, found, strict=True):
            optimizer(gradients)
            named += [(p.name, g.asnumpy()) for p, g in zip(group, gradients, strict=True)]
        rows.append((None if loss is None else float(loss), named))
    all_of_them = [parameter for group in groups for parameter in group]
    slices = {
        p.name: p.layout.local_slices(p.global_shape, world().rank) for p in all_of_them if hasattr(p, "global_shape")
    }
    return rows, [(p.name, p.asnumpy()) for p in all_of_them], slices


@once
def one_card(rows, steps=5):
    """What `train` gives on one card."""
    model = part()
    weights = model.trainable_params()
    step = ms.value_and_grad(lambda tokens, labels, scale: model(tokens, labels=labels, scale=scale)[0], None, weights)

    def gradients_of(number):
        tokens, named = batch(rows, number)
        loss, gradients = step(tokens, **named)
        return loss, [gradients]

    return train(gradients_of, [weights], steps)


def my_rows(mesh, tokens, named):
    """This rank's part of a batch, over dp."""
    if mesh is None:
        return tokens, named
    (index,), count = mesh.coordinate(world().rank, ("dp",)), mesh.axis_size("dp")
    size = len(tokens) // count
    own = slice(index * size, (index + 1) * size)
    return tokens[own], {name: value[own] for name, value in named.items()}


def pipelined(schedule, rows, steps=5, mesh=None):
    """What `train` gives with a schedule."""

    def gradients_of(number):
        for stage in schedule.stages:
            stage.zero_gradients()
        tokens, named = my_rows(mesh, *batch(rows, number))
        results = schedule.run(tokens, **named)
        return None if results is None else results[0], [stage.gradients for stage in schedule.stages]

    return train(gradients_of, [stage.parameters for stage in schedule.stages], steps)


def assert_alike(found, expected, what, rtol=1e-5, atol=1e-6):
    """Losses and gradients of all steps, and parameters at the end, are one card's."""
    rows, values, slices = found
    for number, ((loss, gradients), (true_loss, true_gradients)) in enumerate(zip(rows, expected[0], strict=True)):
        if loss is not None:
            np.testing.assert_allclose(loss, true_loss, rtol, err_msg=f"{what}: loss {number}")
        for path, gradient in gradients:
            true = dict(true_gradients)[path][slices.get(path, ...)]
            np.testing.assert_allclose(gradient, true, rtol, atol, err_msg=f"{what}: step {number}, gradient of {path}")
    for path, value in values:
        true = dict(expected[1])[path][slices.get(path, ...)]
        np.testing.assert_allclose(value, true, rtol, atol, err_msg=f"{what}: {path} after all steps")
