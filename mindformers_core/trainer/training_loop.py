"""The training job of a recipe on this process's part of the mesh, in PyNative or compiled."""

import math
import os
import time
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass

import mindspore as ms

from mindformers_core.checkpoint.checkpointer import Checkpointer
from mindformers_core.checkpoint.folders import set_aside
from mindformers_core.checkpoint.parts import on_all_ranks
from mindformers_core.checkpoint.tensors import ranks_of
from mindformers_core.communication import init_distributed, process_state
from mindformers_core.communication.messages import check_equal
from mindformers_core.data.datasets import dataset_of, local_batch
from mindformers_core.diff.recorder import perturb
from mindformers_core.files import write_whole
from mindformers_core.hints import first_of
from mindformers_core.mesh import DeviceMesh
from mindformers_core.optimizers.settings import Placed, placed_lines
from mindformers_core.recipe.learning_rate import learning_rate
from mindformers_core.recipe.loader import recipe_keys, recipe_to_yaml
from mindformers_core.recipe.sections import Recipe, accumulation_steps, recipe_mesh
from mindformers_core.sharding.replicas import check_replicas
from mindformers_core.trainer import records
from mindformers_core.trainer.cells import build_cells, check_patterns, loss_scale_of, placed_of
from mindformers_core.trainer.checkpoints import (
    checkpointer_of,
    going_on,
    open_source,
    reserve_memory,
    resume,
    save_job,
)
from mindformers_core.trainer.recording import start_recording
from mindformers_core.trainer.step import step_function


@dataclass
class Job:
    """State and functions of one process for its steps; `step` and `consumed` (sequences of the stream) increase."""

    recipe: Recipe
    rank: int
    mesh: object
    dataset: object  # see `dataset_of`
    cells: dict  # see `build_cells`
    optimizer: object  # a `GroupedOptimizer`
    run_step: object  # see `step_function`
    batch_size: int  # sequences of a step, of all dp ranks together
    checkpointer: Checkpointer
    loss_scale: object = None  # a `LossScale`
    skipped: int = 0  # steps that were skipped, also before the run was resumed, and in a row
    skipped_in_a_row: int = 0
    step: int = 0
    consumed: int = 0
    loaded_config: object = None  # the contents of the `config.json` of `checkpoint.load_path`


def prepare(recipe):
    """The `Job` of `recipe` before its first step: its programs are generated, and its checkpoint is loaded.

    Raises:
        ValueError, FileNotFoundError: the recipe contradicts the ranks, the data or the checkpoint; its recompute or
            swap is impossible in the model, then on all ranks of a pipeline.
        ModuleNotFoundError: an extra that the recipe needs is not installed.
    """
    records.require_extras(recipe)
    recipe = going_on(recipe)
    world, mesh = enter_world(recipe)
    checkpoint = open_source(recipe)
    return begin_job(recipe, mesh, world.rank, dataset_of(recipe), checkpoint)


def enter_world(recipe):
    """This process's world, and the mesh of a recipe, on the recipe's device.

    Raises:
        ValueError: a device that MindSpore can't use here, another number of ranks, or ranks with different recipes.
    """
    target = recipe.context.device_target
    if ms.get_context("device_target") != target:  # can't be set once kernels have run
        try:
            ms.set_device(target)
        except RuntimeError as error:
            reason = str(error).partition(". ")[0]
            raise ValueError(
                f"context.device_target: MindSpore can't use {target} on this machine ({reason}): use CPU, or "
                "install the driver"
            ) from error
    ms.set_context(mode=ms.PYNATIVE_MODE)  # context.mode: 0 compiles passes and update by themselves
    timeout, check = recipe.context.communication_timeout, recipe.context.check_collectives
    world = init_distributed(timeout=timeout, check_collectives=check)  # never returns in msrun's scheduler
    facts = {"the version of MindSpore": ms.__version__} | recipe_keys(recipe)
    check_equal(DeviceMesh((world.size,), ("rank",)), facts, "start all ranks with one recipe")
    return world, recipe_mesh(recipe, world.size)


def begin_job(recipe, mesh, rank, dataset, checkpoint=None):
    """The `Job` of `rank` before its first step, with the state of a `Checkpoint`, and perturbed if the recipe says so.

    The axes of `mesh` are `MESH_AXES`.
    """
    dp_size = mesh.axis_size("dp")
    batch_size = recipe.training.local_batch_size * dp_size * accumulation_steps(recipe, dp_size)
    check_patterns(recipe)
    ms.set_seed(recipe.training.seed)
    start_recording(recipe, mesh, rank)
    cells = build_cells(recipe, mesh, rank)
    ms.manual_seed(recipe.training.seed)  # after the constructors, of which stages call others
    loss_scale = loss_scale_of(recipe, mesh)
    optimizer, run_step = step_function(recipe, mesh, cells, loss_scale)
    checkpointer = checkpointer_of(recipe, mesh, cells, optimizer)
    job = Job(recipe, rank, mesh, dataset, cells, optimizer, run_step, batch_size, checkpointer, loss_scale)
    if checkpoint is not None:
        resume(job, checkpoint)
    if recipe.monitor.perturb:
        perturb(job.optimizer.parameters, recipe.monitor.perturb, rank)
    return job


def run_steps(job):
    """Run all remaining steps and write their records; all ranks call this.

    Returns:
        The summary line, which rank 0 also writes to `summary.txt`.

    Raises:
        FloatingPointError: on all ranks: the loss, or a gradient, is NaN or infinite; or, when they are to be saved,
            the weights or moments are. SaveError: a checkpoint can't be saved. OSError: the run folder can't be made,
            is another run's, or takes no more records. ValueError: ranks have other weights where they should have the
            same.
    """
    with ExitStack() as held:
        return _run_steps(job, _open_records(job, held))


def _run_steps(job, recorders):
    recipe, folder = job.recipe, job.recipe.training.output_dir
    losses, started = [], time.perf_counter()
    try:
        reserve_memory(job)
        _compare_replicas(job, is_due=True)
        while job.step < recipe.training.steps:
            row = train_step(job)
            losses.append(row["loss"])
            if len(losses) == 1:  # the first step has generated all programs
                records.report_activations(recipe, job.mesh, job.rank, job.cells)
            for record in recorders:
                record(row)
            if "not_finite" in row:
                raise FloatingPointError(row["not_finite"])
            at_end = job.step == recipe.training.steps
            _compare_replicas(job, is_due=at_end)
            if recipe.checkpoint.enable_save and (at_end or job.step % recipe.checkpoint.save_interleaved_steps == 0):
                save_job(job)
    except FloatingPointError:
        with suppress(OSError):
            job.checkpointer.settle()  # the checkpoint before
        raise
    finally:
        job.checkpointer.close()
    seconds = time.perf_counter() - started
    tokens = len(losses) * job.batch_size * recipe.train_dataset.seq_length
    summary = (
        f"{len(losses)} steps on ranks {job.mesh} in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s; "
        f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; run folder {folder}"
    )
    if job.rank == 0:
        with records.record_errors(folder):
            write_whole(os.path.join(folder, "summary.txt"), summary + "\n")
            if recipe.monitor.plot:
                records.draw_losses(folder)
    return summary


def _compare_replicas(job, is_due):
    """Compare what ranks have alike, where it is due or `context.check_replicas` steps are over."""
    every = job.recipe.context.check_replicas
    if every and (is_due or job.step % every == 0):
        check_replicas(list(job.cells.values()), job.optimizer)


def train_step(job):
    """Run one optimizer step; returns its row of metrics.

    Where the loss or a gradient isn't finite, nothing is updated, and the row has a text about it, `not_finite`.
    """
    started = time.perf_counter()
    batch = local_batch(job.recipe, job.mesh, job.rank, job.dataset, job.consumed)
    job.step += 1
    job.consumed += job.batch_size
    rate, scale = learning_rate(job.recipe, job.step), job.loss_scale
    value = scale.value if scale else None
    scalars = job.optimizer.scalars(job.step - job.skipped, rate)
    loss, norm, odd, norms = job.run_step(tuple(map(ms.Tensor, batch)), scalars, job.checkpointer.await_copies)
    process_state().observer.end_step(job.step)
    precision, found = job.recipe.precision, odd or []
    is_skipped = math.isinf(norm) if odd is None else precision.skip_not_finite  # see `step_function`
    job.skipped, job.skipped_in_a_row = job.skipped + is_skipped, is_skipped * (job.skipped_in_a_row + 1)
    if is_skipped:
        odd = found if job.skipped_in_a_row > precision.skipped_steps else None
    seconds = time.perf_counter() - started
    return {
        "step": job.step,
        "loss": loss,
        "learning_rate": rate,
        "gradient_norm": norm,
        "seconds": seconds,
        "tokens_per_second": job.batch_size * job.recipe.train_dataset.seq_length / seconds,
        **{f"gradient_norm {pattern}": each for pattern, each in zip(job.recipe.monitor.gradient_norms, norms)},
        **({"loss_scale": value} if scale else {}),
        **({"skipped": job.skipped} if scale or precision.skip_not_finite else {}),
    } | ({} if odd is None else {"not_finite": _not_finite(job, loss, norm, odd)})


def _not_finite(job, loss, norm, names):
    """What a step says that made no update, for the `names` of this rank; all ranks call this."""
    found = sorted(ranks_of(job.mesh, job.rank).gather(names).items(), reverse=True)  # the last stage first
    names = list(dict.fromkeys(name for _, own in found for name in own))
    cause = "all gradients are finite" + (", but not the sum of their squares" if math.isinf(norm) else "")
    if job.skipped_in_a_row:
        cause = f"{job.skipped_in_a_row} steps in a row are skipped, more than precision.skipped_steps"
    if names:
        cause = (
            f"{cause}, and " * bool(job.skipped_in_a_row)
            + f"{len(names)} weights have gradients that aren't finite, in the order of the backward pass "
        )
        cause += first_of(names, 3)
    return (
        f"at step {job.step} (samples {job.consumed - job.batch_size} to {job.consumed - 1}) the loss is {loss:g}, and "
        f"the norm of all gradients {norm:g}: {cause}; the weights stay as they were after step {job.step - 1}"
    )


def _open_records(job, held):
    """Make the run folder, which rank 0 has until the stack `held` is closed; all ranks call this.

    Returns:
        Functions that each record a row of metrics; none on other ranks.
    """
    found, ranks = [], ranks_of(job.mesh, job.rank)
    with records.record_errors(job.recipe.training.output_dir):
        on_all_ranks(ranks, lambda: found.extend(_records(job, held)) if job.rank == 0 else None)
    gathered = ranks.gather({name: astuple(each) for name, each in placed_of(job.recipe, job.cells).items()})
    placed = {name: Placed(*each) for own in gathered.values() for name, each in own.items()}
    if job.rank == 0:
        print("\n".join(placed_lines(placed, job.recipe.optimizer)))
    return found


def _records(job, held):
    recipe, folder = job.recipe, job.recipe.training.output_dir
    own, loaded = map(os.path.realpath, (folder, recipe.checkpoint.load_path))
    carries_on = job.step > 0 and os.path.commonpath([own, loaded]) == own  # from a checkpoint in its own folder
    held.enter_context(records.open_run_folder(folder, recipe_to_yaml(recipe), keep=carries_on))
    if carries_on and (others := set_aside(folder, job.step)):
        print(f"checkpoints of later steps are now {', '.join(others)}")
    kind = "micro-batches" if recipe.parallelism.pipeline_parallel == 1 else "pipeline runs"
    count = accumulation_steps(recipe, job.mesh.axis_size("dp"))
    print(f"{recipe.training.steps} steps of {count} {kind} on ranks {job.mesh}; run folder {folder}")
    recorders = [records.metrics_writer(folder, after_step=job.step)]
    recorders += [records.tensorboard_writer(folder)] if recipe.monitor.tensorboard else []
    return [*recorders, records.progress_writer(recipe.training.steps, recipe.monitor.log_interval)]
