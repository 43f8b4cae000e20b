"""`python -m mindformers_core diff A B`: where two runs part, each a recipe, or the folder of a recorded run."""

import dataclasses
import os
import tempfile
from contextlib import nullcontext

import mindspore as ms

from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.diff.parting import part
from mindformers_core.diff.report import report
from mindformers_core.diff.runs import Run
from mindformers_core.mesh import init_device_mesh
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.trainer.data import dataset_of
from mindformers_core.trainer.recipe import MESH_AXES, mesh_shape
from mindformers_core.trainer.recipe_loader import load_recipe
from mindformers_core.trainer.recording import digest_folder
from mindformers_core.trainer.saved_state import find_checkpoint
from mindformers_core.trainer.training_loop import begin_job, train_step

__all__ = ["diff", "run_simulated"]

_SIDES = ("a", "b")


def diff(sources, overrides, steps, keep=None, perturbed=None):
    """Print where two runs part; returns whether they agree.

    Args:
        sources: two paths, each of a recipe, which is run, or of a recorded run's folder.
        overrides: texts `section.key=value` for both recipes; after `a:` or `b:` for one.
        steps: number of steps that recipes are run for.
        keep: folder that keeps what recipes record; None: it is removed.
        perturbed: folder of A's run recorded with `monitor.perturb=1`; recipes are run perturbed as well.

    Raises:
        ValueError, TypeError, FileNotFoundError: a path, a recipe or an override that is wrong.
    """
    both = [text for text in overrides if text[:2] not in ("a:", "b:")]
    own = [both + [text[2:] for text in overrides if text.startswith(f"{side}:")] for side in _SIDES]
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory(prefix="mindformers_core_diff_") as folder:
        runs, recipes = [], []
        for side, source, changed in zip(_SIDES, sources, own):
            recipe = None if os.path.isdir(source) else load_recipe(source, changed)
            if recipe is None and len(changed) > len(both):
                raise ValueError(f"'{source}' is recorded already: {side}:section.key=value is for a recipe")
            recipes.append(recipe)
            title = " ".join([source, *changed[len(both) :]])
            run = _run(recipe, os.path.join(folder, side), steps, title) if recipe else Run(_recorded(source))
            runs.append(run)
        noise = (runs[0], Run(_recorded(perturbed))) if perturbed else None
        for run, recipe in zip(runs, recipes):
            if noise is None and recipe is not None:
                monitor = dataclasses.replace(recipe.monitor, perturb=1)
                recipe = dataclasses.replace(recipe, monitor=monitor)
                noise = run, _run(recipe, os.path.join(folder, "perturbed"), steps)
        parting = part(*runs, noise)
        print(report(parting))
    return parting.first is None


def _recorded(folder):
    """The folder with the digests of a run folder."""
    inner = os.path.join(folder, "digests")
    return inner if os.path.isdir(inner) else folder


def _run(recipe, folder, steps, title=None):
    """The `Run` of the first steps of a recipe, recorded in a folder."""
    training = dataclasses.replace(recipe.training, output_dir=folder)
    monitor = dataclasses.replace(recipe.monitor, digests=True)
    if recipe.parallelism.data_parallel_shard == -1:
        sizes = dataclasses.replace(recipe.parallelism, data_parallel_shard=1)
        recipe = dataclasses.replace(recipe, parallelism=sizes)
    recipe = dataclasses.replace(recipe, training=training, monitor=monitor)
    run_simulated(recipe, steps)
    return Run(digest_folder(recipe), title)


def run_simulated(recipe, steps, prepare=None):
    """Run the first steps of a recipe, after its checkpoint, on simulated ranks in this process.

    Args:
        recipe: the `Recipe`; its run folder gets digests, if it says so, and no other records.
        steps: number of steps, of those that the recipe has left.
        prepare: None, or a function that is called with every rank's `Job` before its first step.

    Returns:
        For every rank the rows of metrics.

    Raises:
        ValueError: graph mode on several ranks. More: `begin_job`.
    """
    mesh, dataset = init_device_mesh(mesh_shape(recipe), MESH_AXES), dataset_of(recipe)
    if mesh.size > 1 and recipe.context.mode == 0:
        raise ValueError(
            f"context.mode: 0 compiles collectives, which simulated ranks can't run: launch the {mesh.size} ranks with "
            "monitor.digests=true, and give diff the run folder"
        )
    ms.runtime.launch_blocking()
    checkpoint = find_checkpoint(recipe.checkpoint.load_path) if recipe.checkpoint.load_path else None

    def work(rank):
        job = begin_job(recipe, mesh, rank, dataset, checkpoint)
        if prepare is not None:
            prepare(job)
        return [train_step(job) for _ in range(min(steps, recipe.training.steps - job.step))]

    with custom_gradients():
        return SimulatedRanks(mesh.size).run(work)
