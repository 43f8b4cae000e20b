"""The typed sections of a recipe, and the numbers that follow from them. No MindSpore is called here.

Sections and keys are named as in MindSpore Transformers' current (PyNative) YAML format; keys of `model` as in Hugging
Face's `config.json`.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from mindformers_core.mesh import DeviceMesh
from mindformers_core.models.configuration import MOST_LAYERS, LlamaConfig
from mindformers_core.models.spec import DEFAULT_MODEL, model_spec
from mindformers_core.optimizers.settings import AdamWSettings
from mindformers_core.ranges import bounded
from mindformers_core.recipe.learning_rate import MOST_STEPS, LrScheduler
from mindformers_core.recompute.settings import RecomputeSettings, SwapSettings

MESH_AXES = ("pp", "dp", "cp", "tp")
_RANKS, _MANY = 2**17, MOST_STEPS  # the most on an axis, and altogether; the most steps, or sequences of a step


@dataclass(frozen=True)
class Training:
    """Length of the training, batch sizes, and the run folder."""

    steps: int = bounded(1000, 1, _MANY)
    local_batch_size: int = bounded(1, 1, 10**6)  # sequences of one forward pass (or pipeline run) of one dp rank
    # either of these two is enough, see `accumulation_steps`; default: one micro-batch
    global_batch_size: int | None = bounded(None, 1, _MANY)  # sequences of one step, of all dp ranks together
    gradient_accumulation_steps: int | None = bounded(None, 1, 10**6)  # micro-batches of one step on a dp rank
    max_norm: float = bounded(1.0, 0.0, 1e12)  # largest global norm of the gradients; 0: no clipping
    seed: int = bounded(42, 0, 2**32 - 1)
    output_dir: str = ""  # run folder; default output/<name of the recipe's file>
    resume: Literal["auto"] | None = None  # auto: from the run folder's newest checkpoint, if there is one


@dataclass(frozen=True)
class Parallelism:
    """Sizes of the mesh axes: their product is the number of ranks, and the product of both of dp the size of axis dp.

    A batch is sharded over all dp ranks; `zero_level` selects the other tensors that they shard, see `hsdp`.
    """

    data_parallel_replicate: int = bounded(1, 1, _RANKS)  # groups of dp ranks with equal shards
    data_parallel_shard: int = bounded(-1, -1, _RANKS)  # dp ranks of a group; -1: launched ranks / other sizes
    zero_level: Literal[0, 1, 2, 3] = 0  # sharded over a group: 1 optimizer state, 2 also gradients, 3 also weights
    zero_threshold_kb: int | float = bounded(64, 0, 2**40)  # weights up to this size aren't sharded
    reshard_after_forward: bool | None = None  # level 3: free weights after forward; default: yes, in a pipeline no
    gradient_accumulation_shard: bool | None = None  # sums over micro-steps in shards; default: at levels 2 and 3
    comm_fusion: str | int | float | dict = field(default="auto", hash=False)  # see `parse_comm_fusion`
    tensor_parallel: int = bounded(1, 1, _RANKS)
    sequence_parallel: bool = False  # norms compute with the sequence dim sharded over the tp axis
    context_parallel: int = bounded(1, 1, _RANKS)
    pipeline_parallel: int = bounded(1, 1, 1024)  # ranks that layers are divided among; at 1 the keys below are ignored
    pipeline_parallel_schedule: str = "1f1b"  # a name of `SCHEDULES`, or the import path of a user's class
    # number of layers of every stage, of all ranks and chunks; default: equal
    pipeline_parallel_layers_per_stage: tuple[int, ...] = bounded((), 0, MOST_LAYERS)
    pipeline_parallel_interleave_num: int = bounded(1, 1, 128)  # stages (chunks of layers) on every rank
    pipeline_parallel_microbatch_size: int = bounded(1, 1, 10**6)  # sequences; divides local_batch_size

    @property
    def batch_axes(self):
        """Mesh axes that shard a batch; `shard()` hooks read this attribute."""
        return ("dp",)


@dataclass(frozen=True)
class TrainDataset:
    """Text, read as bytes, or token ids in a `.npy` file; or a user's dataset."""

    data_path: tuple[str, ...] = ()  # files, or folders with text; default: the sources of Python's standard library
    seq_length: int = bounded(1024, 1, 2**24)
    max_bytes: int = bounded(16_000_000, 1, 2**50)  # further text is ignored
    cache_dir: str = "~/.cache/mindformers_core"  # folder for the concatenated bytes of text files
    factory: str = ""  # package.module:function that opens a user's dataset, see docs/models.md
    options: dict = field(default_factory=dict, hash=False)  # further settings for that function


@dataclass(frozen=True)
class Checkpoint:
    """Saving into the run folder, and loading on any mesh."""

    enable_save: bool = False
    save_interleaved_steps: int = bounded(1000, 1, _MANY)
    keep_last: int = bounded(0, 0, _MANY)  # number of newest checkpoints that stay in the run folder; 0: all
    keep_every: int = bounded(0, 0, _MANY)  # with keep_last: those of every so many steps stay, too; 0: none
    on_error: Literal["end", "go_on"] = "end"  # where a checkpoint can't be saved; earlier ones stay in any case
    async_save: bool = False  # another process writes a copy of the state, while training goes on
    when_busy: Literal["wait", "skip"] = "wait"  # with async_save: for a checkpoint that is still being written
    load_path: str = ""  # a run folder (its newest checkpoint), one of its checkpoint/step_N, or a Hugging Face folder
    no_load_optim: bool = False  # load weights only, and begin at step 0


@dataclass(frozen=True)
class Precision:
    """Dtypes of `hsdp()`'s `MixedPrecision`, and the loss scale; moments are float32 in any case."""

    parameter: Literal["float32", "float16", "bfloat16"] | None = None  # of updated weights; default: model.dtype
    compute: Literal["float32", "float16", "bfloat16"] | None = None  # of both passes; default: model.dtype
    reduce: Literal["float32", "float16", "bfloat16"] | None = None  # of sums of gradients; default: float32
    # the loss scale doubles after 2000 steps, and halves where gradients aren't finite: that step is skipped
    loss_scale: float | None = bounded(None, 1.0, 2.0**24)  # at first; default: with float16 2**16 / labels, else none
    skip_not_finite: bool = False  # skip steps whose loss or gradients aren't finite also without a loss scale
    skipped_steps: int = bounded(50, 0, _MANY)  # in a row, after which a run ends


@dataclass(frozen=True)
class Monitor:
    """Records of a run besides metrics.jsonl."""

    log_interval: int = bounded(10, 1, _MANY)  # steps between printed lines where there's no terminal
    plot: bool = True  # draw loss.png at the end (extra `plot`)
    tensorboard: bool = False  # write event files (extra `tensorboard`)
    gradient_norms: tuple[str, ...] = ()  # patterns of parameter names: norms of their gradients, in metrics.jsonl
    digests: bool = False  # record every tensor's digest in <output_dir>/digests, for `diff`
    perturb: int = bounded(0, 0, 10**6)  # for `diff`: not 0: change initial weights by a unit of rounding, by this seed


@dataclass(frozen=True)
class Context:
    """Execution of the model."""

    mode: Literal[0, 1] = 1  # 1: PyNative; 0: graph mode: forward and backward pass and the update are compiled
    engine: Literal["generated", "eager"] = "generated"  # see `shard`; eager computes operator by operator
    device_target: Literal["CPU", "GPU", "Ascend"] = "CPU"
    communication_timeout: int = bounded(60, 1, 10**6)  # seconds a rank waits for others before all end with a report
    # steps between comparisons of the weights and moments that ranks have alike, and at the begin and end; 0: none
    check_replicas: int = bounded(100, 0, _MANY)
    check_collectives: bool | None = None  # compare every collective among ranks before it waits; default: on CPU
    # whose prices choose the layouts: CPU, GPU, Ascend, or a YAML file, see propagation.md; default: of device_target
    device_model: str | None = None


@dataclass(frozen=True)
class Recipe:
    """One training job."""

    model: LlamaConfig  # or the config of another model, which the key model.name selects
    training: Training = Training()
    parallelism: Parallelism = Parallelism()
    optimizer: AdamWSettings = AdamWSettings()  # or the settings of another optimizer, which its key type selects
    lr_scheduler: LrScheduler = LrScheduler()  # as well
    train_dataset: TrainDataset = TrainDataset()
    precision: Precision = Precision()
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
    """Sizes of `MESH_AXES`; `data_parallel_shard: -1` needs `world_size`, the number of launched ranks.

    Raises:
        ValueError: the product of the sizes isn't `world_size`, or too large.
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


def recipe_mesh(recipe, world_size=None):
    """The `DeviceMesh` of a recipe, with the axes `MESH_AXES`; arguments and errors as of `mesh_shape`."""
    return DeviceMesh(mesh_shape(recipe, world_size), MESH_AXES)


def accumulation_steps(recipe, dp_size):
    """Number of micro-batches of a dp rank in one step; in a pipeline, of runs of its schedule.

    Either `training.gradient_accumulation_steps`, or the number that follows from `training.global_batch_size`, or 1.

    Args:
        recipe: the `Recipe`.
        dp_size: number of all dp ranks.

    Raises:
        ValueError: the two keys contradict each other, or the global batch isn't a multiple of a micro-batch.
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
