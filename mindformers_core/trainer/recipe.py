"""What a recipe says, as typed sections, and the sizes that follow from them. No MindSpore is called here.

Sections and keys are named as in MindSpore Transformers' current (PyNative) YAML format; keys of `model` as in Hugging
Face's `config.json`.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from mindformers_core.models.configuration import MOST_LAYERS, LlamaConfig
from mindformers_core.models.spec import DEFAULT_MODEL, model_spec
from mindformers_core.ranges import bounded
from mindformers_core.recompute.settings import RecomputeSettings, SwapSettings

__all__ = ["MESH_AXES", "Recipe", "accumulation_steps", "global_batch_size", "mesh_shape"]

MESH_AXES = ("pp", "dp", "cp", "tp")
_RANKS, _MANY = 2**17, 10**9  # the most on an axis, and altogether; the most steps, or sequences of a step


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


def mesh_shape(recipe, world_size=None):
    """Sizes of `MESH_AXES`; `world_size` (ranks that run) is needed for `data_parallel_shard: -1`.

    Raises:
        ValueError: the sizes need another number of ranks than run.
    """
    sizes = recipe.parallelism
    pipeline, context, tensor = sizes.pipeline_parallel, sizes.context_parallel, sizes.tensor_parallel
    replicate, shard = sizes.data_parallel_replicate, sizes.data_parallel_shard
    if shard == -1:
        if world_size is None:
            raise ValueError(
                "parallelism.data_parallel_shard: -1 takes the ranks that were launched, but a dry run launches none: "
                "give a size, as parallelism.data_parallel_shard=8"
            )
        shard = max(1, world_size // (pipeline * replicate * context * tensor))
    needed = pipeline * replicate * shard * context * tensor
    if needed > _RANKS:
        raise ValueError(f"parallelism: its sizes need {needed} ranks altogether: at most {_RANKS} are possible")
    if world_size not in (None, needed):
        groups = f"data_parallel_replicate {replicate} x " if replicate > 1 else ""
        raise ValueError(
            f"parallelism: pipeline_parallel {pipeline} x {groups}data_parallel_shard {shard} x "
            f"context_parallel {context} x tensor_parallel {tensor} needs {needed} ranks, "
            f"but {world_size} {'was' if world_size == 1 else 'were'} launched. Either launch {needed}, as\n"
            f'  bash scripts/msrun_launch.sh "-m mindformers_core train --config …" {needed} {needed}\n'
            f"or change these sizes, as parallelism.data_parallel_shard=…"
        )
    return pipeline, replicate * shard, context, tensor


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
    training, local = recipe.training, recipe.training.local_batch_size
    size, given = training.global_batch_size, training.gradient_accumulation_steps
    if size is None:
        return given or 1
    steps, rest = divmod(size, local * dp_size)
    ranks = f"training.local_batch_size {local} x {dp_size} data-parallel ranks"
    if given is not None and (steps != given or rest):
        whole = local * dp_size * given
        fitting = "" if rest else f" or gradient_accumulation_steps={steps}"
        raise ValueError(
            f"training.global_batch_size: {size} is not {ranks} x training.gradient_accumulation_steps {given} = "
            f"{whole}: try global_batch_size={whole}{fitting}, or give only one of the two"
        )
    if rest:
        raise ValueError(
            f"training.global_batch_size: {size} is no multiple of {ranks} = {local * dp_size}: try "
            f"{max(local * dp_size, size - rest)}"
        )
    return steps


def global_batch_size(recipe, dp_size):
    """Sequences of one step, over all dp ranks and micro-batches; arguments and errors as in `accumulation_steps`."""
    return recipe.training.local_batch_size * dp_size * accumulation_steps(recipe, dp_size)
