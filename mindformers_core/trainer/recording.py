"""Recording of a recipe's run for `diff`."""

import os

import numpy as np

from mindformers_core.communication.world import process_state
from mindformers_core.diff.recorder import DigestRecorder
from mindformers_core.trainer.pipeline_recipe import micro_batches_of_a_run
from mindformers_core.trainer.recipe import accumulation_steps
from mindformers_core.trainer.recipe_loader import recipe_to_yaml


def start_recording(recipe, mesh, rank):
    """From now on record this rank's digests, if the recipe says so."""
    context, local = recipe.context, recipe.training.local_batch_size
    if not recipe.monitor.digests:
        return
    runs = micro_batches_of_a_run(recipe) if recipe.parallelism.pipeline_parallel > 1 else 1
    # of every pass of a step the indices of its sequences, from the step's first one on
    shape = accumulation_steps(recipe, mesh.axis_size("dp")), mesh.axis_size("dp"), runs, local // runs
    sequences = np.arange(np.prod(shape)).reshape(shape).swapaxes(1, 2)
    about = {
        "recipe": recipe_to_yaml(recipe),
        "mesh": str(mesh),
        "ranks": mesh.size,
        "context": f"{'graph mode' if context.mode == 0 else 'PyNative'}, {context.engine}",
        "sequences": sequences.reshape(shape[0] * runs, -1).tolist(),
        "slope": 1 / runs,
    }
    instruments = context.mode == 1 and context.engine == "generated"
    folder = os.path.join(recipe.training.output_dir, "digests")
    process_state().observer = DigestRecorder(folder, rank, about, instruments)
