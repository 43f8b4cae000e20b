"""`python -m mindformers_core diff A B`: where two runs part, each a recipe, or the folder of a recorded run."""

import json
import os
import tempfile
from contextlib import nullcontext
from dataclasses import replace

import mindspore as ms

from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.data.datasets import dataset_of
from mindformers_core.diff.parting import part
from mindformers_core.diff.report import report
from mindformers_core.diff.runs import Run
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import recipe_mesh
from mindformers_core.trainer.trainer import Trainer


def diff(sources, overrides, steps, keep=None, perturbed=None):
    """Print where two runs part; returns whether they agree.

    Args:
        sources: two paths, each of a recipe, which is run, or of a recorded run's folder.
        overrides: texts `section.key=value` for both recipes; after `a:` or `b:` for one.
        steps: number of steps that recipes are run for.
        keep: folder that keeps what recipes record; None: it is removed.
        perturbed: folder of A's run recorded with `monitor.perturb=1`; recipes are run perturbed as well.

    Raises:
        ValueError, TypeError, FileNotFoundError: a wrong path, recipe or override.
    """
    both = [text for text in overrides if text[:2] not in ("a:", "b:")]
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory(prefix="mindformers_core_diff_") as folder:
        runs, recipes = [], []
        for side, source in zip("ab", sources):
            own = [text[2:] for text in overrides if text.startswith(f"{side}:")]
            if not os.path.isdir(source):
                changed, title = [*both, *own], " ".join([source, *own])
                runs.append(_run(source, changed, os.path.join(folder, side), steps, title))
                recipes.append((runs[-1], source, changed))
            elif own:
                raise ValueError(f"'{source}' is recorded already: {side}:section.key=value is for a recipe")
            else:
                runs.append(Run(source))
        noise = None
        if perturbed:
            noise = runs[0], Run(perturbed)
        elif recipes:
            run, source, changed = recipes[0]
            noise = run, _run(source, [*changed, "monitor.perturb=1"], os.path.join(folder, "perturbed"), steps)
        parting = part(*runs, noise)
        print(report(parting))
    return parting.first is None


def _run(source, overrides, folder, steps, title=None):
    """The `Run` of the first steps of a recipe, recorded in a folder."""
    recipe = load_recipe(source, [*overrides, "monitor.digests=true", f"training.output_dir={json.dumps(folder)}"])
    if recipe.parallelism.data_parallel_shard == -1:
        recipe = replace(recipe, parallelism=replace(recipe.parallelism, data_parallel_shard=1))
    run_simulated(recipe, steps)
    return Run(folder, title)


def run_simulated(recipe, steps, prepare=None):
    """Run the first steps of a recipe, after its checkpoint, on simulated ranks; returns every rank's rows of metrics.

    Its run folder gets digests, if it says so, and no other records. `prepare(trainer)` is called before a rank's first
    step. ValueError: graph mode on several ranks.
    """
    mesh, dataset = recipe_mesh(recipe), dataset_of(recipe)
    if mesh.size > 1 and recipe.context.mode == 0:
        raise ValueError(
            f"context.mode: 0 compiles collectives, which simulated ranks can't run: launch the {mesh.size} ranks with "
            "monitor.digests=true, and give diff the run folder"
        )
    ms.runtime.launch_blocking()

    def work(rank):
        trainer = Trainer(recipe, mesh=mesh, dataset=dataset)
        if prepare is not None:
            prepare(trainer)
        return [dict(trainer.train_step()) for _ in range(min(steps, recipe.training.steps - trainer.step))]

    with custom_gradients():
        return SimulatedRanks(mesh.size, plans={}).run(work)
