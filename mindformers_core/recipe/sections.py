"""The typed sections of a recipe, and the numbers that follow from them. No MindSpore is called here.

Keys are named as in MindSpore Transformers' current (PyNative) YAML format; those of `model` as in `config.json`.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from mindformers_core.analysis.recovery import seconds_of
from mindformers_core.batches import BatchPlan, static_order
from mindformers_core.hints import nearest
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.models.configuration import MOST_LAYERS, LlamaConfig
from mindformers_core.models.expert_placement import MoeSettings
from mindformers_core.models.registry import DEFAULT_MODEL, model_spec
from mindformers_core.optimizers.settings import AdamWSettings
from mindformers_core.ranges import bounded
from mindformers_core.recipe.learning_rate import MOST_STEPS, LrScheduler
from mindformers_core.recompute.settings import RecomputeSettings, SwapSettings
from mindformers_core.scopes import errors_at

MESH_AXES = ("pp", "dp", "cp", "tp")
_STRATEGIES = {"full_batch": [], "data_parallel": ["dp"]}  # layouts of an array
_RANKS, _MANY = 2**17, MOST_STEPS  # the most on an axis, and altogether; the most steps, or sequences of a step
_AXES = {"remark": ", names of mesh axes, as [dp] or [cp, tp]: the ranks along them share experts"}


@dataclass(frozen=True)
class Training:
    """Length of the training, batch sizes, and the run folder."""

    steps: int = bounded(1000, 1, _MANY)
    local_batch_size: int = bounded(1, 1, 10**6)  # sequences of one forward pass (or pipeline run) of one dp rank
    # either of these two is enough, see `batch_plan`; default: one run
    global_batch_size: int | None = bounded(None, 1, _MANY)  # sequences of one step, of all dp ranks together
    gradient_accumulation_steps: int | None = bounded(None, 1, 10**6)  # forward passes (or pipeline runs) of one step
    max_norm: float = bounded(1.0, 0.0, 1e12)  # largest global norm of the gradients; 0: no clipping
    average_decay: float | None = bounded(None, 0.0, below=1)  # of a moving average of weights, as 0.999; default: none
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
    context_parallel: int = bounded(1, 1, _RANKS)  # ranks that share every sequence
    # of attention: keys and values gathered, or sent round, or heads cut in the sequence's place; auto: by price
    context_parallel_algorithm: Literal["auto", "gather", "ring", "all_to_all"] = "auto"
    context_parallel_balance: Literal["zigzag", "contiguous", "area"] = "zigzag"  # whose tokens: docs/data.md
    expert_parallel: tuple[str, ...] = field(default=(), metadata=_AXES)  # of dp, cp, tp: share a layer's experts
    expert_tensor_parallel: tuple[str, ...] = field(default=(), metadata=_AXES)  # other ones, which cut each
    pipeline_parallel: int = bounded(1, 1, 1024)  # ranks that layers are divided among; at 1 the keys below are ignored
    pipeline_parallel_schedule: str = "1f1b"  # a name of `SCHEDULES`, or the import path of a user's class
    # number of layers of every stage, of all ranks and chunks; default: equal
    pipeline_parallel_layers_per_stage: tuple[int, ...] = bounded((), 0, MOST_LAYERS)
    pipeline_parallel_interleave_num: int = bounded(1, 1, 128)  # stages (chunks of layers) on every rank
    pipeline_parallel_microbatch_size: int = bounded(1, 1, 10**6)  # sequences; divides local_batch_size

    @property
    def batch_axes(self):
        """Mesh axes that shard the samples of a batch; `shard()` hooks read this attribute."""
        return ("dp",)

    @property
    def sequence_axes(self):
        """Mesh axes that shard each sequence, or None; `shard()` hooks read this attribute."""
        return ("cp",) if self.context_parallel > 1 else None

    @property
    def order(self):
        """The order of equal chunks of every sequence, or None where it is data, see `static_order`."""
        return static_order(self.context_parallel_balance, self.context_parallel)


@dataclass(frozen=True)
class Source:
    """One source of a mixture: files, or a user's object; docs/data.md."""

    data_path: tuple[str, ...] = ()  # as train_dataset.data_path
    factory: str = ""  # package.module:function that opens a user's object with len() and an index
    weight: int = bounded(1, 1, 100_000)  # of so many samples of all weights together


@dataclass(frozen=True)
class TrainDataset:
    """Text, token ids, rows with either; or a user's dataset; docs/data.md."""

    data_path: tuple[str, ...] = ()  # token ids, rows, or text; default: the sources of Python's standard library
    sources: tuple[Source, ...] = ()  # several, mixed by their weights, in the place of data_path
    tokenizer: str = ""  # folder with a Hugging Face tokenizer, for text and conversations; default: bytes
    packing: Literal["none", "documents"] = "none"  # documents: whole ones in a sequence, each for itself
    on_change: Literal["end", "go_on"] = "end"  # where a resumed run has other data
    seq_length: int = bounded(1024, 1, 2**24)
    max_bytes: int | None = bounded(None, 1, 2**50)  # further bytes of text are ignored; default: none
    seed: int | None = bounded(None, 0, 2**32 - 1)  # of the order of samples; default: training.seed
    cache_dir: str = "~/.cache/mindformers_core"  # folder for the tokens of text and rows
    factory: str = ""  # package.module:function that opens a user's dataset, see docs/data.md
    options: dict = field(default_factory=dict, hash=False)  # further settings for that function
    # what a rank reads of a batch: full_batch: all, data_parallel: rows by dp, or a list with a layout for each array,
    # as [[dp, null, tp], [dp]]; default: what the model's shard() declares
    dataset_strategy: str | list | None = field(default=None, hash=False)

    @property
    def is_own(self):
        """Whether a user's function opens samples of it."""
        return bool(self.factory or any(source.factory for source in self.sources))


@dataclass(frozen=True)
class Evaluation:
    """Loss and perplexity of held-out samples, those of one card on any mesh, see metrics.md."""

    interval: int = bounded(0, 0, _MANY)  # steps between evaluations, of which the last step has one, too; 0: none
    samples: int = bounded(64, 1, _MANY)  # of an evaluation: the first ones of the dataset
    dataset: dict = field(default_factory=dict, hash=False)  # keys of train_dataset with other values than there
    metrics: tuple[str, ...] = ()  # package.module:Class of a `Metric`


@dataclass(frozen=True)
class Checkpoint:
    """Saving into the run folder, and loading on any mesh."""

    enable_save: bool = False
    save_interleaved_steps: int | str = bounded(1000, 1, _MANY)  # auto: by what saving costs, and mtbf
    mtbf: int | float | str | None = bounded(None, 1, 1e11)  # with auto: mean seconds between failures, or as 6h
    keep_last: int = bounded(0, 0, _MANY)  # number of newest checkpoints that stay in the run folder; 0: all
    keep_every: int = bounded(0, 0, _MANY)  # with keep_last: those of every so many steps stay, too; 0: none
    on_error: Literal["end", "go_on"] = "end"  # where a checkpoint can't be saved; earlier ones stay in any case
    async_save: bool = False  # another process writes a copy of the state, while training goes on
    when_busy: Literal["wait", "skip"] = "wait"  # with async_save: for a checkpoint that is still being written
    replicas: int = bounded(0, 0, 1)  # 1: the newest state is in memory, too, on two machines: docs/recovery.md
    replicas_interleaved_steps: int = bounded(1, 1, _MANY)  # with replicas: steps between states in memory
    grace: int = bounded(30, 1, 10**6)  # seconds after SIGTERM in which a job saves and leaves, with exit code 75
    check_replicas: bool = False  # before a save, compare what ranks have alike, as context.check_replicas does
    load_path: str = ""  # a run folder (its newest checkpoint), one of its checkpoint/step_N, or a Hugging Face folder
    no_load_optim: bool = False  # load weights only, and begin at step 0
    load_average: bool = False  # load the moving average of the weights in their place, and nothing else
    export_dtype: Literal["source", "float32", "bfloat16"] = "source"  # of weights that `convert` writes into a folder

    def __post_init__(self):
        steps = self.save_interleaved_steps
        if isinstance(steps, str) and steps != "auto":
            raise ValueError(f"save_interleaved_steps: {steps!r} is neither a number of steps nor auto")
        if steps == "auto" and self.mtbf is None:
            raise ValueError("mtbf: missing: save_interleaved_steps: auto needs the mean time between failures, as 6h")
        with errors_at("mtbf: "):
            seconds_of(1 if self.mtbf is None else self.mtbf)


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters of linear layers, which are trained in the place of all weights: `add_adapters`."""

    rank: int = bounded(0, 0, 2**16)  # 0: none
    alpha: float | None = bounded(None, above=0.0, at_most=1e9)  # their factor is alpha / rank; default: rank
    patterns: tuple[str, ...] = ("*_proj",)  # of paths of linear layers, or their ends
    dropout: float = bounded(0.0, at_least=0.0, below=1.0)  # of the inputs of adapters
    page: ClassVar[str] = "docs/fine_tuning.md"


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
    evaluation: Evaluation = Evaluation()
    precision: Precision = Precision()
    moe: MoeSettings = MoeSettings()
    adapters: Adapters = Adapters()
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

    @property
    def data_seed(self):
        """The seed of the order of data."""
        return self.training.seed if self.train_dataset.seed is None else self.train_dataset.seed


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


def batch_plan(recipe, dp_size):
    """The `BatchPlan` of a step for so many dp ranks.

    The samples of a step are `training.global_batch_size`, or those of `training.gradient_accumulation_steps` runs, by
    default of one.

    Raises:
        ValueError: the two keys contradict each other, or a size is no multiple of another one as it has to be.
    """
    training, local, count = recipe.training, recipe.training.local_batch_size, micro_batches_of_a_run(recipe)
    given, many = training.gradient_accumulation_steps, local * dp_size
    size = training.global_batch_size or many * (given or 1)
    plan = BatchPlan(size, dp_size, local // count, count)
    ranks = f"training.local_batch_size {local} x {dp_size} data-parallel ranks"
    if given not in (None, plan.runs):
        raise ValueError(
            f"training.global_batch_size: {size} is not {ranks} x training.gradient_accumulation_steps {given} = "
            f"{many * given}: try global_batch_size={many * given} or gradient_accumulation_steps={plan.runs}, or give "
            "only one of the two"
        )
    if plan.empty and not recipe.spec.ignored:
        raise ValueError(
            f"training.global_batch_size: {size} is no multiple of {ranks} = {many}, as {recipe.model_name} needs, "
            f"whose ModelSpec doesn't say what is ignored in empty rows: try {max(many, size // many * many)}"
        )
    return plan


def micro_batches_of_a_run(recipe):
    """Number of micro-batches of one run of the schedule; of one stage 1.

    Raises:
        ValueError: the batch of one run isn't a multiple of a micro-batch.
    """
    batch, size = recipe.training.local_batch_size, micro_batch_size(recipe)
    if batch % size:
        raise ValueError(
            f"training.local_batch_size: {batch} can't be cut into micro-batches of "
            f"parallelism.pipeline_parallel_microbatch_size {size}: try {max(size, batch // size * size)}"
        )
    return batch // size


def micro_batch_size(recipe):
    """Number of rows of a micro-batch on a rank; of one stage all of a run."""
    sizes = recipe.parallelism
    return sizes.pipeline_parallel_microbatch_size if sizes.pipeline_parallel > 1 else recipe.training.local_batch_size


def dataset_layouts(section, names):
    """Name of an array of the dataset -> the layout that `train_dataset.dataset_strategy` gives it; {} without one.

    Raises:
        ValueError, TypeError: another strategy, or more layouts than names.
    """
    given = section.dataset_strategy or []
    if isinstance(given, str):
        if given not in _STRATEGIES:
            raise ValueError(
                f"train_dataset.dataset_strategy: {given!r} is not one of {', '.join(_STRATEGIES)}"
                f"{nearest(given, _STRATEGIES)}, or a list with a layout for each array"
            )
        given = [_STRATEGIES[given]] * len(names)
    if len(given) > len(names):
        raise ValueError(f"train_dataset.dataset_strategy: {given} has more layouts than the model inputs {names}")
    with errors_at("train_dataset.dataset_strategy: "):
        return {name: layout(*([each] if isinstance(each, str) else each or ())) for name, each in zip(names, given)}
