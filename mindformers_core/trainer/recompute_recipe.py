"""What a recipe says about recompute and swap, and what can't stand beside it. No MindSpore is called here."""

from dataclasses import fields

from mindformers_core.recompute.contradictions import check_gathers
from mindformers_core.recompute.layers import common_layers

__all__ = ["check_recompute", "recompute_arguments", "swap_arguments", "swap_settings"]


def recompute_arguments(recipe):
    """What the recipe says to `recompute()`, as keyword arguments."""
    return {entry.name: getattr(recipe.recompute, entry.name) for entry in fields(recipe.recompute)}


def swap_arguments(recipe):
    """What the recipe says to `swap()`, as keyword arguments."""
    given = {entry.name: getattr(recipe.swap, entry.name) for entry in fields(recipe.swap)}
    return given | ({"op_swap": ()} if recipe.swap.is_short else {})  # errors name what was given


def swap_settings(recipe):
    """The recipe's `SwapSettings`, or None where nothing is swapped."""
    return recipe.swap if recipe.swap.is_on else None


def check_recompute(recipe):
    """Raise `ValueError` for what can't stand together about recompute and swap, with the keys' paths.

    What patterns match is known only where Cells are; so whether compiled passes can do what they ask for is not
    checked here.
    """
    for check in (_check_engine, _check_compiled, _check_layers, _check_gathers, _check_both):
        check(recipe)


def _check_engine(recipe):
    asked = {"recompute": recipe.recompute.is_on, "swap": recipe.swap.is_on}
    sections = " and ".join(name for name in asked if asked[name])
    if sections and recipe.context.engine == "eager":
        raise ValueError(
            f"context.engine: eager keeps what every operator keeps, and {sections} can't change that: use "
            f"context.engine=generated, or leave {sections} out"
        )


def _check_compiled(recipe):
    if recipe.context.mode == 1:
        return
    graph_mode = "context.mode: 0 (graph mode) compiles the passes"
    cells = "recompute.full, recompute.select with patterns of Cells"
    if recipe.recompute.budget is not None:
        raise ValueError(
            f"recompute.budget: {recipe.recompute.budget} chooses single operators, but {graph_mode}, and then only "
            f"whole Cells can be recomputed: use {cells}, or context.mode=1 (PyNative)"
        )
    if swap_settings(recipe) is not None:
        raise ValueError(
            f"swap: nothing can be swapped where {graph_mode}: leave section swap out (swap=false) and use {cells}, or "
            "context.mode=1 (PyNative)"
        )


def _check_layers(recipe):
    count = getattr(recipe.model, "num_hidden_layers", None)
    for path, layers in _named_layers(recipe):
        if count is not None and isinstance(layers, tuple) and layers[-1] >= count:
            raise ValueError(
                f"{path}: there is no layer {layers[-1]}: model.num_hidden_layers {count} makes layers 0 to {count - 1}"
            )


def _named_layers(recipe):
    """`(path, layers)` of every key that names layers."""
    yield "recompute.full", recipe.recompute.full
    swap = swap_settings(recipe)
    if swap is None:
        return
    for index, entry in enumerate(swap.layer_swap):
        yield f"swap.layer_swap[{index}].layers", entry.layers
    for entry in swap.op_swap:
        yield f"{swap.where(entry)}.layers", entry.layers


def _check_gathers(recipe):
    level = recipe.parallelism.zero_level
    gathers = level == 3 or not recipe.recompute.is_on
    check_gathers(recipe.recompute, gathers, "parallelism.zero_level=3", f"zero_level is {level}")


def _check_both(recipe):
    full, swap = recipe.recompute.full, swap_settings(recipe)
    for index, entry in enumerate(swap.layer_swap if swap is not None else ()):
        both = common_layers(full, entry.layers)
        if both:
            which = "all layers" if both is True else f"layer {both[0]}"
            raise ValueError(
                f"swap.layer_swap[{index}].layers: {which} can't be swapped and recomputed (recompute.full): what is "
                "computed again isn't kept, neither here nor on the host: choose one of the two for each layer"
            )
