"""The training job of a recipe on this process's part of the mesh, in PyNative or compiled."""

import dataclasses
import math
import os
import time
from dataclasses import dataclass

import mindspore as ms
import numpy as np

from mindformers_core.communication import init_distributed
from mindformers_core.files import write_whole
from mindformers_core.mesh import init_device_mesh
from mindformers_core.optimizers.adamw import AdamW
from mindformers_core.tensor_parallel.clipping import sum_cell
from mindformers_core.trainer.activation_report import report_activations
from mindformers_core.trainer.data import dataset_of, first_sequence, micro_batch
from mindformers_core.trainer.learning_rate import learning_rate
from mindformers_core.trainer.metrics import MetricsFile, TensorBoardFile, draw_losses, require_extra
from mindformers_core.trainer.pipeline_recipe import pipeline_state
from mindformers_core.trainer.pipeline_step import build_schedule, own_parameters, pipeline_step_function, sharded_model
from mindformers_core.trainer.progress import Progress
from mindformers_core.trainer.recipe import MESH_AXES, Recipe, accumulation_steps, global_batch_size, mesh_shape
from mindformers_core.trainer.recipe_loader import recipe_to_yaml
from mindformers_core.trainer.run_folder import open_run_folder
from mindformers_core.trainer.saved_state import find_checkpoint, load_state, save_state
from mindformers_core.trainer.step import step_function
from mindformers_core.trainer.zero_recipe import zero_settings, zero_state
from mindformers_core.zero import hsdp

__all__ = ["Job", "prepare", "make_job", "resume", "run_steps", "train_step"]


@dataclass
class Job:
    """All that one process needs for its steps; `step` and `consumed` (sequences of the stream) move on."""

    recipe: Recipe
    rank: int
    mesh: object
    dataset: object  # see `dataset_of`
    cells: dict  # number of a stage -> its sharded Cell, of this rank; without a pipeline 0 -> the model
    optimizer: AdamW
    micro_batches: int  # forward and backward passes of a step; in a pipeline runs of its schedule
    batch_size: int  # sequences of a step, of all dp ranks together
    run_step: object  # see `step_function`
    step: int = 0
    consumed: int = 0

    def barrier(self):
        """Wait for all ranks of the mesh."""
        sum_cell(self.mesh, self.mesh.axis_names)(ms.Tensor(1.0)).asnumpy()

    def state(self):
        """What a checkpoint says besides tensors."""
        return {"step": self.step, "consumed": self.consumed, **self.fixed_state()}

    def fixed_state(self):
        """What must be the same in the run that resumes."""
        sizes = dict(zip(self.mesh.axis_names, self.mesh.shape))
        model = {"name": self.recipe.model_name, **dataclasses.asdict(self.recipe.model)}
        return {"mesh": sizes, "model": model} | pipeline_state(self.recipe) | zero_state(self.recipe, self.mesh)

    def tensors(self):
        """The Parameters of a checkpoint: this rank's parts of weights and moments."""
        return [*self.optimizer.parameters, *self.optimizer.state()]


def prepare(recipe):
    """The `Job` of `recipe`, before its first step: ranks joined, data open, model sharded, its programs made,
    checkpoint loaded.

    Raises:
        ValueError, FileNotFoundError: a recipe that doesn't fit the ranks, the data or the checkpoint; recompute or
            swap that the model can't do, on all ranks of a pipeline alike.
        ModuleNotFoundError: an extra that the recipe needs is not installed.
    """
    _check_extras(recipe)
    if ms.get_context("device_target") != recipe.context.device_target:  # can't be set once kernels have run
        _set_device(recipe.context.device_target)
    ms.set_context(mode=ms.PYNATIVE_MODE)  # in graph mode passes and update are compiled, what is between them isn't
    world = init_distributed()  # msrun's scheduler stays in here
    mesh = init_device_mesh(mesh_shape(recipe, world.size), MESH_AXES)
    dataset = dataset_of(recipe)
    checkpoint = find_checkpoint(recipe.checkpoint.load_path) if recipe.checkpoint.load_path else None
    job = make_job(recipe, mesh, world.rank, dataset)
    return job if checkpoint is None else resume(job, checkpoint)


def _set_device(target):
    try:
        ms.set_device(target)
    except RuntimeError as error:
        reason = str(error).partition(". ")[0]
        raise ValueError(
            f"context.device_target: MindSpore can't use {target} on this machine ({reason}): use CPU, or "
            "install the driver"
        ) from error


def make_job(recipe, mesh, rank, dataset):
    """The `Job` at its first step, with `rank` in `mesh`, whose axes are `MESH_AXES`."""
    dp_size = mesh.axis_size("dp")
    micro_batches, batch_size = accumulation_steps(recipe, dp_size), global_batch_size(recipe, dp_size)
    ms.set_seed(recipe.training.seed)
    ms.manual_seed(recipe.training.seed)
    build = _on_one_stage if recipe.parallelism.pipeline_parallel == 1 else _on_stages
    cells, optimizer, run_step = build(recipe, mesh, rank, zero_settings(recipe, mesh, micro_batches))
    return Job(recipe, rank, mesh, dataset, cells, optimizer, micro_batches, batch_size, run_step)


def _on_one_stage(recipe, mesh, rank, zero):
    """`(cells, optimizer, run_step)` without a pipeline; `zero` are the arguments of `hsdp()`."""
    net = hsdp(sharded_model(recipe, mesh), **zero)
    optimizer = AdamW(net.trainable_params(), recipe.optimizer)
    given = micro_batch(recipe)
    run_step = step_function(net, optimizer, recipe.training.max_norm, recipe.context.mode == 0, given)
    return {0: net}, optimizer, run_step


def _on_stages(recipe, mesh, rank, zero):
    """The same for this rank's stages of a pipeline."""
    schedule = build_schedule(recipe, mesh, rank, zero)
    optimizer = AdamW(own_parameters(schedule), recipe.optimizer)
    given = {stage.stage_index: micro_batch(recipe, stage.stage_index) for stage in schedule.stages}
    is_compiled = recipe.context.mode == 0
    names = recipe.spec.inputs
    run_step = pipeline_step_function(schedule, optimizer, recipe.training.max_norm, mesh, is_compiled, given, names)
    return {stage.stage_index: stage.cell for stage in schedule.stages}, optimizer, run_step


def resume(job, checkpoint):
    """`job` itself, set to where the run that saved the folder `checkpoint` was."""
    state = load_state(checkpoint, job.fixed_state(), job.tensors(), job.rank)
    job.step, job.consumed = state["step"], state["consumed"]
    if job.step >= job.recipe.training.steps:
        raise ValueError(f"training.steps: {job.recipe.training.steps}, but {checkpoint} already has {job.step} steps")
    return job


def run_steps(job):
    """All steps that are left, with their records; every rank calls this.

    Returns:
        The summary line, which rank 0 has also written to `summary.txt`.

    Raises:
        FloatingPointError: the loss is not a number any more.
    """
    recipe, folder = job.recipe, job.recipe.training.output_dir
    records = _open_records(job) if job.rank == 0 else []
    job.barrier()
    losses, started = [], time.perf_counter()
    while job.step < recipe.training.steps:
        row = train_step(job)
        losses.append(row["loss"])
        if len(losses) == 1:  # there are programs now
            report_activations(recipe, job.mesh, job.rank, job.cells)
        for record in records:
            record(row)
        if not math.isfinite(row["loss"]):
            raise FloatingPointError(f"the loss is {row['loss']} at step {job.step}: see {folder}/metrics.jsonl")
        at_end = job.step == recipe.training.steps
        if recipe.checkpoint.enable_save and (at_end or job.step % recipe.checkpoint.save_interleaved_steps == 0):
            save_state(folder, job.state(), job.tensors(), job.rank, job.barrier)
    seconds = time.perf_counter() - started
    tokens = len(losses) * job.batch_size * recipe.train_dataset.seq_length
    summary = (
        f"{len(losses)} steps on ranks {job.mesh} in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s; "
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; run folder {folder}"
    )
    if job.rank == 0:
        write_whole(os.path.join(folder, "summary.txt"), summary + "\n")
        if recipe.monitor.plot:
            draw_losses(folder)
    return summary


def train_step(job):
    """One optimizer step over `micro_batches` micro-batches; returns its row of metrics."""
    started = time.perf_counter()
    batch = _batch(job)
    job.step += 1
    job.consumed += job.batch_size
    rate = learning_rate(job.recipe, job.step)
    loss, norm = job.run_step(tuple(map(ms.Tensor, batch)), *job.optimizer.scalars(job.step, rate))
    loss, norm = float(loss.asnumpy()), float(norm.asnumpy())
    seconds = time.perf_counter() - started
    return {
        "step": job.step,
        "loss": loss,
        "learning_rate": rate,
        "gradient_norm": norm,
        "seconds": seconds,
        "tokens_per_second": job.batch_size * job.recipe.train_dataset.seq_length / seconds,
    }


def _batch(job):
    """The arrays of this step's micro-batches on this rank, each (micro-batches, local batch, …): ids and labels."""
    (dp_rank,) = job.mesh.coordinate(job.rank, ("dp",))
    dp_size, local = job.mesh.axis_size("dp"), job.recipe.training.local_batch_size
    firsts = [first_sequence(job.consumed, index, dp_rank, dp_size, local) for index in range(job.micro_batches)]
    return map(np.stack, zip(*(job.dataset.batch(first, local) for first in firsts)))


def _open_records(job):
    """Make the run folder; functions that each take a step's row."""
    recipe, folder = job.recipe, job.recipe.training.output_dir
    moved = open_run_folder(folder, recipe_to_yaml(recipe), keep=_carries_on(recipe))
    if moved:
        print(f"an earlier run was moved to {moved}")
    kind = "micro-batches" if recipe.parallelism.pipeline_parallel == 1 else "pipeline runs"
    print(f"{recipe.training.steps} steps of {job.micro_batches} {kind} on ranks {job.mesh}; run folder {folder}")
    records = [MetricsFile(folder, after_step=job.step).write]
    if recipe.monitor.tensorboard:
        records.append(TensorBoardFile(folder).write)
    return [*records, Progress(recipe.training.steps, recipe.monitor.log_interval).show]


def _carries_on(recipe):
    """Whether the run resumes from a checkpoint in its own folder."""
    folder = os.path.realpath(recipe.training.output_dir)
    load_path = recipe.checkpoint.load_path
    return bool(load_path) and os.path.commonpath([folder, os.path.realpath(load_path)]) == folder


def _check_extras(recipe):
    """Report missing extras before hours of training, not after."""
    if recipe.monitor.plot:
        require_extra("matplotlib", "plot", "monitor.plot")
    if recipe.monitor.tensorboard:
        require_extra("tensorboard", "tensorboard", "monitor.tensorboard")
