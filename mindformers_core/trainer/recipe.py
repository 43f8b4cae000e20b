"""What a recipe says, as typed sections, and what can't stand together in one. No MindSpore is called here.

Sections and keys are named as in MindSpore Transformers' current (PyNative) YAML format; keys of `model` as in Hugging
Face's `config.json`.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from mindformers_core.models.configuration import MOST_LAYERS, LlamaConfig
from mindformers_core.models.spec import DEFAULT_MODEL, model_spec
from mindformers_core.ranges import bounded
from mindformers_core.recompute.settings import RecomputeSettings, SwapSettings
from mindformers_core.trainer.pipeline_recipe import check_pipeline
from mindformers_core.trainer.recompute_recipe import check_recompute
from mindformers_core.trainer.zero_recipe import check_zero

__all__ = [
    "Recipe",
    "check_recipe",
    "mesh_shape",
    "accumulation_steps",
    "global_batch_size",
    "warmup_steps",
    "MESH_AXES",
]

MESH_AXES = ("pp", "dp", "cp", "tp")
_RANKS, _MANY = 2**17, 10**9  # the most on an axis, and altogether; the most steps, or sequences of a step
# MindSpore 2.10 has no bfloat16 CPU kernel of Gather, which the embedding needs
_DTYPES = {"CPU": ("float32", "float16")} | dict.fromkeys(("GPU", "Ascend"), ("float32", "float16", "bfloat16"))


@dataclass(frozen=True)
class Training:
    """How long, how much at once, and where the run folder is."""

    steps: int = bounded(1000, 1, _MANY)
    local_batch_size: int = bounded(1, 1, 10**6)  # sequences of one forward pass (or pipeline run) of one dp rank
    # one of these two is enough: the other, or where none is given one micro-batch, follows (`accumulation_steps`)
    global_batch_size: int | None = bounded(None, 1, _MANY)  # sequences of one step, of all dp ranks together
    gradient_accumulation_steps: int | None = bounded(None, 1, 10**6)  # micro-batches of one step on a dp rank
    max_norm: float = bounded(1.0, 0.0, 1e12)  # largest global norm of the gradients; 0: no clipping
    seed: int = bounded(42, 0, 2**32 - 1)
    output_dir: str = ""  # run folder; default output/<name of the recipe's file>


@dataclass(frozen=True)
class Parallelism:
    """Sizes of the mesh axes. All sizes multiplied are the number of ranks; both of dp multiplied are the axis dp.

    A batch is sharded among all dp ranks. What else they shard is said by `zero_level`, see `hsdp`.
    """

    data_parallel_replicate: int = bounded(1, 1, _RANKS)  # groups of dp ranks; every group holds the same
    data_parallel_shard: int = bounded(-1, -1, _RANKS)  # dp ranks of a group; -1: all ranks that the others leave
    zero_level: Literal[0, 1, 2, 3] = 0  # a group shards 1 optimizer state, 2 gradients too, 3 weights too
    zero_threshold_kb: int = bounded(64, 0, 2**40)  # weights of as many KB, and smaller ones, stay whole
    reshard_after_forward: bool | None = None  # level 3: drop weights after forward; default: yes, in a pipeline no
    gradient_accumulation_shard: bool | None = None  # sums over micro-steps in parts; default: at levels 2 and 3
    comm_fusion: str | int | float | dict = field(default="auto", hash=False)  # see `parse_comm_fusion`
    tensor_parallel: int = bounded(1, 1, _RANKS)
    sequence_parallel: bool = False  # norms work on a slice of the sequence dim, over the tp axis
    context_parallel: int = bounded(1, 1, _RANKS)
    pipeline_parallel: int = bounded(1, 1, 1024)  # ranks for the layers; at 1 the rest is unused
    pipeline_parallel_schedule: str = "1f1b"  # a name of `SCHEDULES`, or the import path of a class of one's own
    # by stage, over all ranks and chunks; default: alike
    pipeline_parallel_layers_per_stage: tuple[int, ...] = bounded((), 0, MOST_LAYERS)
    pipeline_parallel_interleave_num: int = bounded(1, 1, 128)  # stages (chunks of layers) on every rank
    pipeline_parallel_microbatch_size: int = bounded(1, 1, 10**6)  # local_batch_size is cut into such micro-batches

    @property
    def batch_axes(self):
        """Mesh axes that shard a batch, as `shard()` hooks ask for them."""
        return ("dp",)


@dataclass(frozen=True)
class Optimizer:
    """AdamW (Loshchilov and Hutter 2019), with bias correction."""

    type: Literal["AdamW"] = "AdamW"
    betas: tuple[float, float] = bounded((0.9, 0.95), 0, below=1)
    eps: float = bounded(1e-8, 0.0, 1)
    weight_decay: float = bounded(0.01, 0.0, 100)
    weight_decay_exclude: tuple[str, ...] = ("*norm*", "*bias*")  # patterns of parameter names that don't decay


@dataclass(frozen=True)
class LrScheduler:
    """The learning rate at every step: linear from 0 during warm-up, then by `type`."""

    type: Literal["ConstantWarmUpLR", "LinearWithWarmUpLR", "CosineWithWarmUpLR"] = "CosineWithWarmUpLR"
    learning_rate: float = bounded(1e-5, 0.0, 100)  # at the end of warm-up
    lr_end: float = bounded(0.0, 0.0, 100)  # at the last step
    warmup_steps: int = bounded(0, 0, _MANY)
    warmup_ratio: float | None = bounded(None, 0.0, below=1.0)  # of training.steps, instead of warmup_steps


@dataclass(frozen=True)
class TrainDataset:
    """Text, read as bytes, or token ids in a `.npy` file; or a dataset of one's own."""

    data_path: tuple[str, ...] = ()  # files, or folders with text; default: the sources of Python's standard library
    seq_length: int = bounded(1024, 1, 2**24)
    max_bytes: int = bounded(16_000_000, 1, 2**50)  # text beyond this is left out
    cache_dir: str = "~/.cache/mindformers_core"  # where the bytes of text files are put together
    factory: str = ""  # package.module:function, which opens a dataset of one's own, see docs/models.md
    options: dict = field(default_factory=dict, hash=False)  # what is left to that function


@dataclass(frozen=True)
class Checkpoint:
    """Saving into the run folder, and resuming."""

    enable_save: bool = False
    save_interleaved_steps: int = bounded(1000, 1, _MANY)
    load_path: str = ""  # a run folder (its newest checkpoint) or one of its checkpoint/step_N folders


@dataclass(frozen=True)
class Monitor:
    """What is shown and drawn besides metrics.jsonl."""

    log_interval: int = bounded(10, 1, _MANY)  # steps between printed lines where there's no terminal
    plot: bool = True  # draw loss.png at the end (extra `plot`)
    tensorboard: bool = False  # write event files (extra `tensorboard`)


@dataclass(frozen=True)
class Context:
    """How the model is executed."""

    mode: Literal[0, 1] = 1  # 1: PyNative; 0: graph mode, forward and backward passes, and the update, are compiled
    engine: Literal["generated", "eager"] = "generated"  # see `shard`; eager computes operator by operator
    device_target: Literal["CPU", "GPU", "Ascend"] = "CPU"


@dataclass(frozen=True)
class Recipe:
    """One training job."""

    model: LlamaConfig  # or the config of another model that the key model.name says
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LrScheduler = LrScheduler()
    train_dataset: TrainDataset = TrainDataset()
    checkpoint: Checkpoint = Checkpoint()
    monitor: Monitor = Monitor()
    context: Context = Context()
    recompute: RecomputeSettings = RecomputeSettings()
    swap: SwapSettings = SwapSettings()
    model_name: ClassVar[str] = DEFAULT_MODEL

    @property
    def spec(self):
        """The `ModelSpec` of the model."""
        return model_spec(self.model_name)


def check_recipe(recipe):
    """Raise `ValueError` for the first combination of keys that can't work, with the keys' paths."""
    about_ranks = (check_pipeline, check_zero)
    for check in (_check_available, _check_model_divides, *about_ranks, check_recompute, _check_data, _check_schedule):
        check(recipe)
    sizes = recipe.parallelism
    if sizes.data_parallel_shard > 0:
        accumulation_steps(recipe, sizes.data_parallel_replicate * sizes.data_parallel_shard)


def mesh_shape(recipe, world_size=None):
    """Sizes of `MESH_AXES`; `world_size` (ranks that run) is needed for `data_parallel_shard: -1`.

    Raises:
        ValueError: the sizes need another number of ranks than run.
    """
    sizes = recipe.parallelism
    others = sizes.pipeline_parallel * sizes.data_parallel_replicate * sizes.context_parallel * sizes.tensor_parallel
    shard = sizes.data_parallel_shard
    if shard == -1:
        if world_size is None:
            raise ValueError(
                "parallelism.data_parallel_shard: -1 takes the ranks that were launched, but a dry run launches none: "
                "give a size, as parallelism.data_parallel_shard=8"
            )
        shard = max(1, world_size // others)
    if shard * others > _RANKS:
        raise ValueError(
            f"parallelism: its sizes need {shard * others} ranks altogether: at most {_RANKS} are possible"
        )
    if world_size is not None and shard * others != world_size:
        raise ValueError(_wrong_number_of_ranks(sizes, shard, shard * others, world_size))
    dp = sizes.data_parallel_replicate * shard
    return (sizes.pipeline_parallel, dp, sizes.context_parallel, sizes.tensor_parallel)


def _wrong_number_of_ranks(sizes, shard, needed, world_size):
    replicate = sizes.data_parallel_replicate
    groups = f"data_parallel_replicate {replicate} x " if replicate > 1 else ""
    return (
        f"parallelism: pipeline_parallel {sizes.pipeline_parallel} x {groups}data_parallel_shard {shard} x "
        f"context_parallel {sizes.context_parallel} x tensor_parallel {sizes.tensor_parallel} needs {needed} ranks, "
        f"but {world_size} {'was' if world_size == 1 else 'were'} launched. Either launch {needed}, as\n"
        f'  bash scripts/msrun_launch.sh "-m mindformers_core train --config …" {needed} {needed}\n'
        f"or change these sizes, as parallelism.data_parallel_shard=…"
    )


def accumulation_steps(recipe, dp_size):
    """Micro-batches that every dp rank runs in one step; in a pipeline, runs of its schedule.

    They are `training.gradient_accumulation_steps`, or follow from `training.global_batch_size`, or are 1 where neither
    is given.

    Args:
        recipe: the `Recipe`.
        dp_size: number of dp ranks, groups and shards together.

    Raises:
        ValueError: the global batch is not whole micro-batches, or is not as many as the recipe says.
    """
    training = recipe.training
    given, at_once = training.gradient_accumulation_steps, training.local_batch_size * dp_size
    if training.global_batch_size is None:
        return given or 1
    if given is not None and training.global_batch_size != at_once * given:
        raise ValueError(_batches_that_differ(training, dp_size, at_once))
    if training.global_batch_size % at_once:
        fitting = max(at_once, training.global_batch_size // at_once * at_once)
        raise ValueError(
            f"training.global_batch_size: {training.global_batch_size} is no multiple of training.local_batch_size "
            f"{training.local_batch_size} x {dp_size} data-parallel ranks = {at_once}: try {fitting}"
        )
    return training.global_batch_size // at_once


def _batches_that_differ(training, dp_size, at_once):
    size, given = training.global_batch_size, training.gradient_accumulation_steps
    fitting = f" or gradient_accumulation_steps={size // at_once}" if size % at_once == 0 else ""
    return (
        f"training.global_batch_size: {size} is not training.local_batch_size {training.local_batch_size} x {dp_size} "
        f"data-parallel ranks x training.gradient_accumulation_steps {given} = {at_once * given}: try "
        f"global_batch_size={at_once * given}{fitting}, or give only one of the two"
    )


def global_batch_size(recipe, dp_size):
    """Sequences of one step, over all dp ranks and micro-batches; arguments and errors as in `accumulation_steps`."""
    return recipe.training.local_batch_size * dp_size * accumulation_steps(recipe, dp_size)


def warmup_steps(recipe):
    """Number of warm-up steps, from `warmup_steps` or `warmup_ratio`."""
    ratio = recipe.lr_scheduler.warmup_ratio
    return recipe.lr_scheduler.warmup_steps if ratio is None else math.ceil(ratio * recipe.training.steps)


def _check_available(recipe):
    sizes = recipe.parallelism
    if sizes.context_parallel > 1:
        raise ValueError(
            f"parallelism.context_parallel: {sizes.context_parallel} is not available yet: it can only be 1"
        )
    if sizes.data_parallel_shard < 1 and sizes.data_parallel_shard != -1:
        raise ValueError(f"parallelism.data_parallel_shard: {sizes.data_parallel_shard} is neither -1 nor at least 1")
    if recipe.context.mode == 0 and recipe.context.engine == "eager":
        raise ValueError(
            "context.engine: eager can't be compiled, as context.mode: 0 (graph mode) asks: use "
            "context.engine=generated, or context.mode=1 (PyNative)"
        )
    dtypes, dtype = _DTYPES[recipe.context.device_target], getattr(recipe.model, "dtype", "float32")
    if dtype not in dtypes:
        raise ValueError(
            f"model.dtype: MindSpore can't run {dtype} models on context.device_target "
            f"{recipe.context.device_target}: use {' or '.join(dtypes)} there, or another device_target"
        )


def _check_model_divides(recipe):
    tp = recipe.parallelism.tensor_parallel
    for key, size in recipe.spec.divided(recipe.model):
        if size % tp:
            fitting = [divisor for divisor in range(1, tp) if size % divisor == 0]
            raise ValueError(
                f"model.{key}: {size} can't be cut into parallelism.tensor_parallel {tp} parts: try {fitting[-1]}"
            )
    seq_length = recipe.train_dataset.seq_length
    if recipe.parallelism.sequence_parallel and seq_length % tp:
        raise ValueError(
            f"train_dataset.seq_length: {seq_length} can't be cut into parallelism.tensor_parallel {tp} parts, as "
            f"parallelism.sequence_parallel needs: try {seq_length // tp * tp}"
        )


def _check_data(recipe):
    dataset, model = recipe.train_dataset, recipe.model
    longest, vocab_size = (getattr(model, key, None) for key in ("max_position_embeddings", "vocab_size"))
    if longest is not None and dataset.seq_length > longest:
        raise ValueError(
            f"train_dataset.seq_length: {dataset.seq_length} is more than model.max_position_embeddings {longest}"
        )
    if dataset.factory:
        return
    if vocab_size is None:
        raise ValueError(
            "train_dataset.factory: missing: a model without vocab_size doesn't take tokens; name the function that "
            "opens its dataset, as my_package.data:open_images"
        )
    if not any(path.endswith(".npy") for path in dataset.data_path) and vocab_size < 256:
        raise ValueError(f"model.vocab_size: {vocab_size} is too small for bytes of text: at least 256")


def _check_schedule(recipe):
    schedule = recipe.lr_scheduler
    if schedule.warmup_ratio is not None and schedule.warmup_steps:
        raise ValueError("lr_scheduler: warmup_steps and warmup_ratio are both given: give one")
    if schedule.lr_end > schedule.learning_rate:
        raise ValueError(
            f"lr_scheduler.lr_end: {schedule.lr_end} is more than lr_scheduler.learning_rate {schedule.learning_rate}"
        )
