"""What a recipe's sections recompute and swap can't have beside other sections. No MindSpore is called here."""

from mindformers_core.recompute.settings import check_compilable, check_gathers

__all__ = ["check_recompute"]


def check_recompute(recipe):
    """Raise `ValueError` for what can't stand together about recompute and swap, with the keys' paths.

    What layers and patterns match is known only where Cells are.
    """
    asked = {"recompute": recipe.recompute.is_on, "swap": recipe.swap.is_on}
    sections = " and ".join(name for name in asked if asked[name])
    if sections and recipe.context.engine == "eager":
        raise ValueError(
            f"context.engine: eager keeps what every operator keeps, and {sections} can't change that: use "
            f"context.engine=generated, or leave {sections} out"
        )
    if recipe.context.mode == 0:
        check_compilable(recipe.recompute, recipe.swap)
    level = recipe.parallelism.zero_level
    check_gathers(recipe.recompute, level == 3, "parallelism.zero_level=3", f"zero_level is {level}")
