"""What a run says of a recipe's `recompute.budget`: what was chosen, stage by stage, and its picture."""

import os

from mindformers_core.recompute import write_curve

__all__ = ["report_budget"]


def report_budget(recipe, mesh, rank, cells):
    """Print what is computed again, and write the picture of the choice into the run folder; nothing without a budget.

    To be called on every rank once the Cells have run; of the ranks that have a stage the first one says it.

    Args:
        recipe: the `Recipe`.
        mesh: with the axis "pp".
        rank: this process's.
        cells: number of a stage -> its Cell, of this rank.
    """
    others = tuple(axis for axis in mesh.axis_names if axis != "pp")
    if recipe.recompute.budget is None or any(mesh.coordinate(rank, others)):
        return
    folder, is_whole = recipe.training.output_dir, recipe.parallelism.pipeline_parallel == 1
    for stage, cell in cells.items():
        path = os.path.join(folder, "recompute_curve.svg" if is_whole else f"recompute_curve_stage_{stage}.svg")
        said = write_curve(cell, path)
        print(f"{said if is_whole else f'stage {stage}: {said}'}\n  what memory costs: {path}")
