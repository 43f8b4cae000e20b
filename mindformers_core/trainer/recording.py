"""Recording of a recipe's run for `diff`."""

import os

from mindformers_core.communication.world import process_state
from mindformers_core.diff.recorder import DigestRecorder
from mindformers_core.trainer.pipeline_recipe import micro_batches_of_a_run
from mindformers_core.trainer.recipe import accumulation_steps
from mindformers_core.trainer.recipe_loader import recipe_to_yaml

__all__ = ["digest_folder", "start_recording"]


def digest_folder(recipe):
    """The folder with the digests of a recipe's run."""
    return os.path.join(recipe.training.output_dir, "digests")


def start_recording(recipe, mesh, rank):
    """From now on record this rank's digests, if the recipe says so."""
    monitor, context = recipe.monitor, recipe.context
    if not monitor.digests:
        return
    about = {
        "recipe": recipe_to_yaml(recipe),
        "mesh": str(mesh),
        "ranks": mesh.size,
        "context": f"{'graph mode' if context.mode == 0 else 'PyNative'}, {context.engine}",
        "sequences": _sequences(recipe, mesh.axis_size("dp")),
        "slope": 1 / micro_batches_of_a_run(recipe) if recipe.parallelism.pipeline_parallel > 1 else 1.0,
    }
    instruments = context.mode == 1 and context.engine == "generated"
    process_state().observer = DigestRecorder(digest_folder(recipe), rank, about, instruments)


def _sequences(recipe, dp_size):
    """For every pass of a step the indices of its sequences, from the step's first one on."""
    local, sizes, found = recipe.training.local_batch_size, recipe.parallelism, []
    part = sizes.pipeline_parallel_microbatch_size if sizes.pipeline_parallel > 1 else local
    for run in range(accumulation_steps(recipe, dp_size)):
        for first in range(0, local, part):
            starts = [(run * dp_size + rank) * local + first for rank in range(dp_size)]
            found.append([start + each for start in starts for each in range(part)])
    return found
