"""Recording of a recipe's run for `diff`."""

import os

import numpy as np

from mindformers_core.communication.world import process_state
from mindformers_core.diff.recorder import DigestRecorder
from mindformers_core.recipe.loader import recipe_to_yaml
from mindformers_core.recipe.pipeline import micro_batches_of_a_run
from mindformers_core.recipe.sections import accumulation_steps


def start_recording(recipe, mesh, rank):
    """From now on record this rank's digests, if the recipe says so."""
    context, local = recipe.context, recipe.training.local_batch_size
    if not recipe.monitor.digests:
        return
    passes, size = micro_batches_of_a_run(recipe), mesh.axis_size("dp")
    # of every pass of a step the indices of its sequences, from the step's first one on
    sequences = np.arange(accumulation_steps(recipe, size) * size * local).reshape(-1, size * local // passes)
    about = {
        "recipe": recipe_to_yaml(recipe),
        "mesh": str(mesh),
        "ranks": mesh.size,
        "context": f"{'graph mode' if context.mode == 0 else 'PyNative'}, {context.engine}",
        "sequences": sequences.tolist(),
        "slope": 1 if recipe.spec.loss == "sum" else 1 / passes,
    }
    instruments = context.mode == 1 and context.engine == "generated"
    folder = os.path.join(recipe.training.output_dir, "digests")
    process_state().observer = DigestRecorder(folder, rank, about, instruments)
