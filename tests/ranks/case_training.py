"""Training on meshes, in every engine and compiled: the curve and the parameters of one rank; clipping, resuming."""

import dataclasses
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
import test_label_weights as label_weights
from support.launch import on_ranks
from support.streams import CountedRow, token_stream
from truth import once

from mindformers_core.communication import world
from mindformers_core.layout import Layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.padding import padded_array, stored_shape
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import MESH_AXES, batch_plan
from mindformers_core.tensor_parallel.clipping import ClipByGlobalNorm, clip_by_global_norm
from mindformers_core.trainer.joining import enter_world
from mindformers_core.trainer.trainer import Trainer

CONFIGS = Path(__file__).parent.parent.parent / "configs"
SMALL = (
    "training.steps=4", "training.local_batch_size=2", "training.global_batch_size=8", "train_dataset.seq_length=16",
    "model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1", "lr_scheduler.warmup_steps=0",
    "monitor.plot=false", "model.vocab_size=257",
)  # fmt: skip


def job_on(shape, ranks, *overrides):
    """The small job on a mesh of `shape` (pp, dp, cp, tp) over `ranks`, with random tokens that are counted."""
    recipe = load_recipe(str(CONFIGS / "llama_tiny_cpu.yaml"), [*SMALL, *overrides])
    tokens = np.random.default_rng(0).integers(0, 256, 5000)
    mesh = init_device_mesh(shape, MESH_AXES, ranks)
    return Trainer(recipe, mesh=mesh, dataset=token_stream(CountedRow(tokens, []), 16, seed=2))


@once
def training_alone(count, *overrides):
    """Steps in four micro-batches on this rank for itself: of each its row, and the parameters by name."""
    job = job_on((1, 1, 1, 1), [world().rank], *overrides)
    assert batch_plan(job.recipe, 1).runs == 4
    ms.manual_seed(3)
    steps = []
    for _ in range(count):
        row = job.train_step()
        steps.append((row, {parameter.name: parameter.asnumpy().copy() for parameter in job.optimizer.parameters}))
    return steps


def compare_with_one_rank(*overrides, shape=(1, 2, 1, 2), alike=(), micro_batches=None, steps=2):
    """So many steps on a mesh and, on every rank for itself, on one: losses, norms and parameters agree.

    `overrides` are the mesh's alone, `alike` those of both jobs; a step of the mesh has so many `micro_batches`,
    forward passes or pipeline runs: by default as many sequences in each as on one rank. Returns the mesh's job.
    """
    shared = job_on(shape, None, *alike, *overrides)
    assert batch_plan(shared.recipe, shape[1]).runs == (micro_batches or 4 // shape[1])
    rows, parameters = zip(*training_alone(steps, *alike))
    ms.manual_seed(3)
    for expected in rows:
        row = shared.train_step()
        for key in ("loss", "gradient_norm", "learning_rate"):
            np.testing.assert_allclose(row[key], expected[key], rtol=1e-5, err_msg=f"{key} at step {row['step']}")
        tokens = [each["tokens_per_second"] * each["seconds"] for each in (row, expected)]
        np.testing.assert_allclose(*tokens, rtol=1e-9)
    every = parameters[-1]
    parts = {parameter.name: parameter for parameter in shared.optimizer.parameters}
    assert len(parts) == len(shared.optimizer.parameters) and (shape[0] > 1 or parts.keys() == every.keys())
    for name, part in parts.items():
        mine = part.layout.local_slices(stored_shape(part), world().rank)
        expected = padded_array(every[name], stored_shape(part))[mine]  # no axis divides the vocabulary
        np.testing.assert_allclose(part.asnumpy(), expected, rtol=1e-4, atol=1e-5, err_msg=part.name)
    return shared


@on_ranks(4)
def case_sequence_parallel_training_equals_one_rank():
    """With it, and a dataset whose sequences are cut: a rank reads its tokens, and one more for the last label."""
    strategy = "train_dataset.dataset_strategy=[[dp, tp], [dp, tp]]"
    job = compare_with_one_rank("parallelism.sequence_parallel=true", strategy)
    job._batches.close()
    read = job.dataset.sources[0].source.ids.read
    assert read[:2] == [5000, 5000] and {*read[2:]} == {16 // 2 + 1}, read  # first its ends, for the fingerprint


DROPPING = ("model.attention_dropout=0.2",)


@on_ranks(2, nightly=(4,))
def case_eager_training_equals_one_rank():
    """Operator by operator; ranks share sequences, in zigzag, and drop the same weights of attention."""
    tensor = world().size // 2
    cut = "parallelism.context_parallel=2", f"parallelism.sequence_parallel={str(tensor > 1).lower()}"
    compare_with_one_rank("context.engine=eager", *cut, shape=(1, 1, 2, tensor), alike=DROPPING, steps=1)


COMPILED = "context.mode=0"  # a case each, since a compiled job takes minutes on four ranks of two cores


@on_ranks(nightly=(4,))
def case_compiled_sequence_parallel_training_equals_one_rank():
    """Graph mode: forward and backward of two micro-batches in one graph, clipping and AdamW in another."""
    compare_with_one_rank(COMPILED, "parallelism.sequence_parallel=true")


@on_ranks(nightly=(4,))
def case_compiled_training_on_cp_4_equals_one_rank():
    """Layers are recomputed, and drop weights of attention."""
    cut = "parallelism.context_parallel=4", "recompute.full=true"
    compare_with_one_rank(COMPILED, *cut, shape=(1, 1, 4, 1), alike=DROPPING)


@on_ranks(nightly=(4,))
def case_compiled_training_on_tp_4_with_copied_heads_equals_one_rank():
    """Two heads of keys and values."""
    few = ("model.num_key_value_heads=2",)
    compare_with_one_rank(COMPILED, "parallelism.tensor_parallel=4", shape=(1, 1, 1, 4), alike=few)


def compiled_context_parallel(heads, algorithm):
    """With few heads of keys and values; sequences are cut over tp, too, where norms are."""
    keys = {"sequence_parallel": "true", "context_parallel": 2, "context_parallel_algorithm": algorithm}
    cut = [f"parallelism.{key}={value}" for key, value in keys.items()]
    few = (f"model.num_key_value_heads={heads}",)
    compare_with_one_rank(COMPILED, *cut, shape=(1, 1, 2, 2), alike=few, steps=1)


@on_ranks(nightly=(4,))
def case_compiled_context_parallel_training_by_all_to_all_equals_one_rank():
    """One head of keys, of which ranks have copies."""
    compiled_context_parallel(1, "all_to_all")


@on_ranks(nightly=(4,))
def case_compiled_context_parallel_training_in_a_ring_equals_one_rank():
    """Two heads of keys."""
    compiled_context_parallel(2, "ring")


@on_ranks(nightly=(4,))
def case_compiled_context_parallel_training_by_gathers_equals_one_rank():
    """Two heads of keys."""
    compiled_context_parallel(2, "gather")


def quickstart(ranks, count):
    """The losses of the first steps of the quickstart's recipe, whose sequences so many ranks share."""
    sizes = {"data_parallel_shard": 1, "tensor_parallel": 1, "context_parallel": count}
    given = [f"parallelism.{key}={size}" for key, size in sizes.items()]
    recipe = load_recipe(str(CONFIGS / "llama_tiny_cpu.yaml"), [*given, "monitor.plot=false"])
    job = Trainer(recipe, mesh=init_device_mesh((1, 1, count, 1), MESH_AXES, ranks))
    return [job.train_step()["loss"] for _ in range(60 // world().size)]


@once
def quickstart_alone():
    return quickstart([world().rank], 1)


@on_ranks(nightly=(2, 4))
def case_the_quickstart_on_cut_sequences_has_the_curve_of_one_rank():
    expected = quickstart_alone()
    assert expected[-1] < expected[0] - 0.5, expected
    np.testing.assert_allclose(quickstart(None, world().size), expected, rtol=1e-5)


def pipeline(schedule, chunks=1):
    """Overrides for a pipeline of two ranks: micro-batches of one sequence, two of them at once."""
    keys = {"": 2, "_schedule": schedule, "_interleave_num": chunks, "_microbatch_size": 1}
    return [f"parallelism.pipeline_parallel{key}={value}" for key, value in keys.items()]


DEEP = "model.num_hidden_layers=4", "model.tie_word_embeddings=true"


@on_ranks(nightly=(4,))
def case_pipelined_training_equals_one_rank():
    """With tensor and sequence parallel; several runs a step, tied embeddings, on one rank as two stages.

    Daily with ZeRO: `case_pipelined_levels_equal_one_rank`.
    """
    overrides = [*pipeline("zb_v", 2), "parallelism.sequence_parallel=true"]
    compare_with_one_rank(*overrides, shape=(2, 1, 1, 2), alike=DEEP)


@once
def uneven_steps_alone():
    """Three steps of one batch each, clipped, on this rank for itself: losses and norms, and the parameters by name."""
    mesh = init_device_mesh((1, 1, 1, 1), MESH_AXES, [world().rank])
    job = Trainer(label_weights.recipe(16, {}), mesh=mesh)
    figures = [(row["loss"], row["gradient_norm"]) for row in (job.train_step() for _ in range(3))]
    assert min(norm for _, norm in figures) > job.recipe.training.max_norm
    return figures, {parameter.name: parameter.asnumpy() for parameter in job.optimizer.parameters}


@on_ranks(nightly=(4,))
def case_every_label_weighs_alike():
    """Three compiled steps of uneven micro-batches on pp 2 x dp 2, of whose labels all to none count.

    Daily, on simulated ranks in PyNative: `test_label_weights`.
    """
    rank, cut = world().rank, label_weights.CUTS["pp 2 x dp 2, runs *"]
    expected, whole = uneven_steps_alone()
    recipe = label_weights.recipe(*cut)
    recipe = dataclasses.replace(recipe, context=dataclasses.replace(recipe.context, mode=0))
    job = Trainer(recipe, mesh=init_device_mesh((2, 2, 1, 1), MESH_AXES))
    assert job.plan.empty == 8
    for figures in expected:
        row = job.train_step()
        np.testing.assert_allclose((row["loss"], row["gradient_norm"]), figures, 1e-5)
    for part in job.optimizer.parameters:
        mine = part.layout.local_slices(part.global_shape, rank)
        np.testing.assert_allclose(part.asnumpy(), whole[part.name][mine], atol=1e-5, err_msg=part.name)


@on_ranks(nightly=(4,))
def case_compiled_pipelined_training_equals_one_rank():
    """Graph mode: every stage, of one layer, compiled, and the update."""
    overrides = [*pipeline("zb_h1"), "context.mode=0", "parallelism.sequence_parallel=true"]
    compare_with_one_rank(*overrides, shape=(2, 1, 1, 2), alike=(*DEEP, "model.num_hidden_layers=2"))


@on_ranks(nightly=(8,))
def case_pipelined_training_on_three_axes_equals_one_rank():
    """pp 2 x dp 2 x tp 2; pp 2 x cp 2 x tp 2, with weights cut over cp."""
    overrides = [*pipeline("interleaved_1f1b", 2), "parallelism.sequence_parallel=true"]
    compare_with_one_rank(*overrides, shape=(2, 2, 1, 2), alike=DEEP)
    cut = "context_parallel=2", "zero_level=3", "zero_threshold_kb=0"
    alike = (*DEEP, "model.num_key_value_heads=1")
    compare_with_one_rank(*overrides, *map("parallelism.{}".format, cut), shape=(2, 1, 2, 2), alike=alike)


@on_ranks(nightly=(2,))
def case_compiled_training_on_one_axis_equals_one_rank():
    """On tp alone, with four micro-batches, and on dp alone."""
    compare_with_one_rank("context.mode=0", shape=(1, 1, 1, 2))
    compare_with_one_rank("context.mode=0", shape=(1, 2, 1, 1))


@on_ranks(2)
def case_ranks_with_different_recipes_or_data_end_before_they_train():
    """The error names key, values and ranks; folders of a machine may differ. Nor may they have other data."""
    rank = world().rank

    def enter(*overrides):
        sizes = ["parallelism.tensor_parallel=1", "parallelism.data_parallel_shard=2", "training.global_batch_size=4"]
        return enter_world(load_recipe(str(CONFIGS / "llama_tiny_cpu.yaml"), [*SMALL, *sizes, *overrides]))

    _, mesh = enter(f"train_dataset.cache_dir=/tmp/{rank}")
    assert mesh.shape == (1, 2, 1, 1)
    for key, values in (("training.seed", ("42", "7")), ("model.dtype", ("float32", "float16"))):
        one, other = (value if value.isdigit() else f'"{value}"' for value in values)
        with pytest.raises(ValueError, match=f"{key} is {one} on rank 0 and {other} on rank 1: start all ranks with"):
            enter(f"{key}={values[rank]}")
    recipe = load_recipe(str(CONFIGS / "llama_tiny_cpu.yaml"), [*SMALL, "training.global_batch_size=4"])
    with pytest.raises(
        ValueError, match="source 0: tokens is 500 on rank 0 and 501 on rank 1: give all ranks the same data$"
    ):
        Trainer(recipe, mesh=mesh, dataset=token_stream(np.zeros(500 + rank, int), 16, seed=2))


@on_ranks(4)
def case_clipping_counts_every_element_once():
    """Parameters that no axis, one axis, or both shard, on either dim."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    generator = np.random.default_rng(0)
    entries = [(), (("tp",), ()), ((), ("dp",)), (("dp",), ("tp",)), ((), ("tp", "dp")), ((), ("tp",))]
    layouts = [Layout.on(mesh, dims or ((), ())) for dims in entries]
    whole = [generator.normal(size=(4, 8)).astype(np.float32) for _ in layouts]
    expected = np.sqrt(sum((gradient**2).sum() for gradient in whole))
    parameters, gradients = [], []
    for index, (layout, gradient) in enumerate(zip(layouts, whole, strict=True)):
        gradients.append(ms.Tensor(gradient[layout.local_slices(gradient.shape, world().rank)]))
        parameters.append(ms.Parameter(gradients[-1], name=f"p{index}"))
        parameters[-1].layout = layout
    clip = ClipByGlobalNorm(parameters, 1.0)

    @ms.jit
    def compiled(*gradients):
        return clip(gradients)

    for clipped, norm in (clip_by_global_norm(gradients, parameters, 1.0), compiled(*gradients)):
        np.testing.assert_allclose(norm.asnumpy(), expected, rtol=1e-6)
        for one, other in zip(clipped, gradients, strict=True):
            np.testing.assert_allclose(one.asnumpy(), other.asnumpy() / expected, rtol=1e-5)
