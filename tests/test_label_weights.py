"""Every label that counts weighs alike in a step, however the batch is cut: as in one batch on one card."""

from dataclasses import replace
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from support.nightly import daily
from support.simulated_training import train_simulated
from support.small_pipelines import Scale, array, pipeline

from mindformers_core.commands.diffing import run_simulated
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.mesh import DeviceMesh
from mindformers_core.models.llama import LlamaForCausalLM
from mindformers_core.models.spec import ModelSpec
from mindformers_core.passes.label_counts import label_count
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.pipeline import ScheduleLoopedBFS, ScheduleZBV
from mindformers_core.recipe.loader import recipe_from_dict
from mindformers_core.recipe.sections import Precision
from mindformers_core.sharding.initialize import materialize
from mindformers_core.tensor_parallel.layers import VocabParallelCrossEntropy
from mindformers_core.zero import hsdp, value_and_grad

pytestmark = pytest.mark.long

SAMPLES, LENGTH, VOCAB = 16, 12, 24
MODEL = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH,
}  # fmt: skip
CUTS = {  # name -> sequences of a run, and `parallelism`; * some rows are empty
    "runs": (4, {}),
    "dp 3, runs *": (3, {"data_parallel_shard": 3}),
    "dp 4, runs": (2, {"data_parallel_shard": 4}),
    "dp 2 x tp 2, runs *": (3, {"data_parallel_shard": 2, "tensor_parallel": 2}),
    "level 1 *": (3, {"data_parallel_shard": 2, "zero_level": 1, "zero_threshold_kb": 0}),
    "level 2 *": (1, {"data_parallel_shard": 3, "zero_level": 2, "zero_threshold_kb": 0}),
    "level 3 *": (3, {"data_parallel_shard": 2, "data_parallel_replicate": 2, "zero_level": 3, "zero_threshold_kb": 0}),
    "cp 2, runs": (4, {"context_parallel": 2}),
    "cp 2 x tp 2 *": (6, {"context_parallel": 2, "tensor_parallel": 2}),
    "cp 3, runs *": (3, {"context_parallel": 3, "data_parallel_shard": 2}),
    "cp 3 x tp 2, level 1": (
        4, {"context_parallel": 3, "tensor_parallel": 2, "sequence_parallel": True, "data_parallel_shard": 2,
            "zero_level": 1, "zero_threshold_kb": 0}),
    "pp 2 x dp 2 x cp 2 at level 3 *": (
        3, {"pipeline_parallel": 2, "context_parallel": 2, "data_parallel_shard": 2, "zero_level": 3,
            "zero_threshold_kb": 0, "pipeline_parallel_microbatch_size": 1}),
    "pp 2 x dp 2": (
        8, {"pipeline_parallel": 2, "data_parallel_shard": 2, "pipeline_parallel_microbatch_size": 4}),
    "micro-batches *": (18, {"pipeline_parallel": 2, "pipeline_parallel_microbatch_size": 3}),
    "micro-batches, runs": (4, {"pipeline_parallel": 2, "pipeline_parallel_microbatch_size": 1}),
    "pp 2 x dp 2, runs *": (
        6, {"pipeline_parallel": 2, "data_parallel_shard": 2, "pipeline_parallel_microbatch_size": 2}),
    "split gradients": (
        4, {"pipeline_parallel": 2, "data_parallel_shard": 2, "pipeline_parallel_schedule": "zb_h1"}),
    "pipeline at level 2 *": (
        3, {"pipeline_parallel": 2, "data_parallel_shard": 3, "zero_level": 2, "zero_threshold_kb": 0}),
}  # fmt: skip


def dataset(*_):
    """Samples of which all, some, one or none of the labels count, the same in every step."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, VOCAB, (SAMPLES, LENGTH + 1)).astype(np.int32)
    labels = np.where(draw.random((SAMPLES, LENGTH)) < np.linspace(0, 1.3, SAMPLES)[:, None], -100, ids[:, 1:])
    labels[12:], labels[12, 3], labels[15] = -100, ids[12, 4], ids[15, 1:]  # empty rows repeat the last one
    arrays = ids[:, :-1], labels.astype(np.int32)

    def batch(first, count):
        return tuple(array[np.arange(first, first + count) % SAMPLES] for array in arrays)

    return SimpleNamespace(batch=batch)


def recipe(local, parallelism, **training):
    return recipe_from_dict({
        "model": MODEL, "parallelism": {"data_parallel_shard": 1, **parallelism},
        "train_dataset": {"factory": "test_label_weights:dataset", "seq_length": LENGTH},
        "training": {"local_batch_size": local, "global_batch_size": SAMPLES, "max_norm": 0.5, "steps": 10, **training},
        "lr_scheduler": {"learning_rate": 1e-2, "warmup_steps": 0},
    })  # fmt: skip


def trained(local, parallelism, steps=1, **precision):
    """Losses and norms of the steps, the gradients of the first one, and the parameters at the end; global arrays."""
    given = replace(recipe(local, parallelism, steps=steps), precision=Precision(**precision))
    rows, gradients, weights, _ = train_simulated(given, steps)
    figures = [[(row["loss"], row["gradient_norm"]) for row in of_rank] for of_rank in rows]
    assert all(of_rank == figures[0] for of_rank in figures)
    return np.array(figures[0]), gradients, weights


@pytest.fixture(scope="module", params=(1, pytest.param(10, marks=pytest.mark.nightly)))
def one_card(request):
    return trained(SAMPLES, {}, request.param)


def test_one_batch_is_the_mean_over_its_labels(one_card):
    """The truth of the other tests, by MindSpore's own gradients of the model's mean."""
    with ms.DeviceCtx("meta"):
        net = LlamaForCausalLM(recipe(SAMPLES, {}).model)
    materialize(net, 42)
    loss, found = ms.value_and_grad(net, None, net.trainable_params())(*map(Tensor, dataset().batch(0, SAMPLES)))
    figures, gradients, _ = one_card
    np.testing.assert_allclose(figures[0, 0], loss.asnumpy(), rtol=1e-6)
    for parameter, gradient in zip(net.trainable_params(), found, strict=True):
        np.testing.assert_allclose(gradients[parameter.name], gradient.asnumpy(), atol=1e-7)


BY_DAY = "runs", "cp 2, runs", "micro-batches, runs", "split gradients"  # one of each kind of runs


@pytest.mark.parametrize("name", daily(BY_DAY, CUTS))
def test_every_label_weighs_alike(name, one_card):
    figures, gradients, weights = trained(*CUTS[name], len(one_card[0]))
    np.testing.assert_allclose(figures, one_card[0], rtol=1e-5)
    for path, gradient in one_card[1].items():
        np.testing.assert_allclose(gradients[path], gradient, atol=1e-6, err_msg=path)
        np.testing.assert_allclose(weights[path], one_card[2][path], atol=1e-5, err_msg=path)


def counted_squares(output, target):
    """The sum over the rows that `target` counts, and their number."""
    return ops.sum(ops.square(output) * ops.expand_dims(target, 1)), ops.sum(ops.cast(target, ms.int32))


HALVED = "micro-batches, runs", "pp 2 x dp 2", "pp 2 x dp 2, runs *", "level 3 *"


@pytest.mark.nightly  # by day a job of experts: test_routed_recipes
@pytest.mark.parametrize("name", HALVED)
def test_passes_in_half_precision(name, one_card):
    """Weights and moments in float32: figures within the rounding of float16, with a loss scale that skips nothing."""
    figures, gradients, _ = trained(*CUTS[name], compute="float16")
    np.testing.assert_allclose(figures, one_card[0][:1], rtol=2e-3)
    for path, gradient in one_card[1].items():
        np.testing.assert_allclose(gradients[path], gradient, atol=2e-3 * np.abs(gradient).max(), err_msg=path)


def test_a_loss_scale_skips_steps_up_to_a_limit():
    """Of 2**24: no step of the run is finite, and the third one in a row is too many."""
    given = recipe(8, {"data_parallel_shard": 2}, steps=3)
    precision = Precision(compute="float16", loss_scale=2.0**24, skipped_steps=2)
    given = replace(given, model=replace(given.model, num_hidden_layers=1), precision=precision)
    rows, _ = run_simulated(given, 3)
    assert [row["loss_scale"] for row in rows] == [2.0**24, 2.0**23, 2.0**22] and rows[2]["skipped"] == 3
    assert rows[0]["loss"] == rows[2]["loss"] and "not_finite" not in rows[1]
    assert "3 steps in a row are skipped, more than precision.skipped_steps" in rows[2]["not_finite"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", [ScheduleLoopedBFS, ScheduleZBV])
@pytest.mark.parametrize("compiled", [False, True])
def test_uneven_micro_batches_of_a_pipeline(kind, compiled):
    """Of 1, 3, 2 and 2 rows, of which 1, 1, 0 and 2 count, in two runs; gradients are read between them, too."""
    x, counts = array(8, 4), np.array([1, 0, 1, 0, 0, 0, 1, 1], np.float32)
    cuts = [slice(0, 1), slice(1, 4), slice(4, 6), slice(6, 8)]
    cells = [Scale(0), Scale(1)]
    schedule = pipeline(cells, 2, kind, counted_squares, compiled, loss="sum")
    weights = [parameter for stage in schedule.stages for parameter in stage.parameters]
    for first, rows in ((0, slice(0, 4)), (2, slice(0, 8))):
        pieces = [((Tensor(x[cut]),), {"target": Tensor(counts[cut])}) for cut in cuts[first : first + 2]]
        total, number = schedule.run_microbatches(pieces)
        found = [gradient.asnumpy() for stage in schedule.stages for gradient in stage.gradients]

        def mean(x, target):
            total, number = counted_squares(cells[1](cells[0](x)), target)
            return total / number

        _, true = ms.value_and_grad(mean, None, weights)(Tensor(x[rows]), Tensor(counts[rows]))
        for weight, one, other in zip(weights, found, true, strict=True):
            np.testing.assert_allclose(one, other.asnumpy(), 1e-5, 1e-7, weight.name)
    assert (number.item(), total.shape) == (2, ())


class Counts(nn.Cell):
    """Returns a sum and a number of labels."""

    def __init__(self):
        super().__init__()
        self.scale = Scale(0)

    def construct(self, x, target):
        return counted_squares(self.scale(x), target)


@pytest.mark.parametrize("level", [None, "level1", "level2", "level3"])
def test_ranks_with_batches_of_their_own_weigh_by_labels(level):
    """Plain Cells in two micro-steps: of the labels of rank 0 nine count and then none, of rank 1 none and then one."""
    ms.runtime.launch_blocking()
    x, counts = array(36, 4), np.repeat([1, 0, 1, 0], [9, 18, 1, 8]).astype(np.float32)
    start = Counts()
    values = {path: parameter.asnumpy() for path, parameter in start.parameters_and_names()}
    mean = ms.value_and_grad(lambda *given: ops.div(*start(*given)), None, start.trainable_params())
    _, true = mean(Tensor(x), Tensor(counts))
    expected = dict(zip(values, (each.asnumpy() for each in true), strict=True))

    def work(rank):
        net = Counts()
        for path, parameter in net.parameters_and_names():
            parameter.set_data(Tensor(values[path]))
        sizes = {"shard_size": 2, "optimizer_level": level, "threshold": 0} if level else {"shard_size": 1}
        hsdp(net, mesh=DeviceMesh((2,), ("dp",)), accumulate_grad_step=2, **sizes)
        gradient_of = value_and_grad(net, loss="sum")
        for step in range(2):
            rows = slice(9 * rank + 18 * step, 9 * rank + 18 * step + 9)
            _, gradients = gradient_of(Tensor(x[rows]), Tensor(counts[rows]))
        return [(parameter, each.asnumpy()) for parameter, each in zip(net.trainable_params(), gradients, strict=True)]

    with custom_gradients():
        for rank, found in enumerate(SimulatedRanks(2).run(work)):
            for parameter, gradient in found:
                mine = parameter.layout.local_slices(parameter.global_shape, rank)
                np.testing.assert_allclose(gradient, expected[parameter.name][mine], 1e-5, 1e-7)


@pytest.mark.usefixtures("one_rank")
def test_gradients_of_plain_cells_weigh_by_labels():
    """Under `hsdp()`: two micro-steps, and one of labels none of which count."""

    x, counts = array(6, 4), np.array([1, 0, 1, 0, 0, 0], np.float32)
    net = Counts()
    mean = ms.value_and_grad(lambda *given: ops.div(*net(*given)), None, net.trainable_params())
    _, true = mean(Tensor(x), Tensor(counts))
    gradient_of = value_and_grad(hsdp(net, accumulate_grad_step=3), loss="sum")
    for cut in (slice(0, 1), slice(1, 3), slice(3, 6)):
        _, gradients = gradient_of(Tensor(x[cut]), Tensor(counts[cut]))
    for one, other in zip(gradients, true, strict=True):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), 1e-5)
    gradient_of = value_and_grad(hsdp(Scale(0, True)), loss="sum")
    with pytest.raises(ValueError, match="the sum of its losses and the number of labels, .* it gave a loss alone"):
        gradient_of(Tensor(x))
    with pytest.raises(ValueError, match=r"an integer, .* it gave float32 \[\], float32 \[\]"):
        label_count((Tensor(1.0), Tensor(0.5)), "Net")
    for make in (
        lambda: value_and_grad(net, loss="total"),
        lambda: pipeline([Scale(0)], loss="total"),
        lambda: VocabParallelCrossEntropy(loss="total"),
        lambda: ModelSpec(Scale, object, loss="total"),
    ):
        with pytest.raises(ValueError, match=r'loss=.total.\): should be "mean" or "sum"'):
            make()
