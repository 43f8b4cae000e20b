"""Recording of a recipe's run for `diff`."""

import os

from mindformers_core.communication.world import process_state
from mindformers_core.diff.recorder import DigestRecorder
from mindformers_core.recipe.loader import recipe_to_yaml


def start_recording(recipe, mesh, plan, rank):
    """From now on record this rank's digests, if the recipe says so; `plan`: the `BatchPlan` of a step."""
    context, sizes = recipe.context, recipe.parallelism
    if not recipe.monitor.digests:
        return
    about = {
        "recipe": recipe_to_yaml(recipe),
        "mesh": str(mesh),
        "ranks": mesh.size,
        "context": f"{'graph mode' if context.mode == 0 else 'PyNative'}, {context.engine}",
        "sequences": [*map(list, plan.passes)],  # of each micro-batch, from the step's first one on
        # of the tokens of a row: digests sum up by places in the batch
        "order": sizes.order or f"{sizes.context_parallel_balance} of {sizes.context_parallel} ranks",
        "slope": 1 if recipe.spec.loss == "sum" else 1 / plan.micro_batches,
    }
    instruments = context.mode == 1 and context.engine == "generated"
    folder = os.path.join(recipe.training.output_dir, "digests")
    process_state().observer = DigestRecorder(folder, rank, about, instruments)
