"""What a run says of a recipe's recompute and swap: what is computed again and what is kept, stage by stage."""

import os

from mindformers_core.recompute import write_curve
from mindformers_core.sharding.inspecting import explain_activations

__all__ = ["report_activations"]


def report_activations(recipe, mesh, rank, cells):
    """Print what is computed again, and under a budget write the picture of the choice into the run folder.

    To be called on every rank once the Cells have run; of the ranks that have a stage the first one says it. Nothing is
    said without recompute and swap.

    Args:
        recipe: the `Recipe`.
        mesh: with the axis "pp".
        rank: this process's.
        cells: number of a stage -> its Cell, of this rank.
    """
    others = tuple(axis for axis in mesh.axis_names if axis != "pp")
    if any(mesh.coordinate(rank, others)):
        return
    is_whole = recipe.parallelism.pipeline_parallel == 1
    for stage, cell in cells.items():
        if recipe.recompute.budget is None:
            said = "\n  ".join(explain_activations(cell))
        else:
            name = "recompute_curve.svg" if is_whole else f"recompute_curve_stage_{stage}.svg"
            path = os.path.join(recipe.training.output_dir, name)
            said = f"{write_curve(cell, path)}\n  what memory costs: {path}"
        if said:
            print(said if is_whole else f"stage {stage}: {said}")
