"""Joining the ranks that were launched, on the recipe's device and mesh."""

import mindspore as ms

from mindformers_core.communication import init_distributed
from mindformers_core.communication.messages import check_equal
from mindformers_core.mesh import DeviceMesh
from mindformers_core.recipe.loader import recipe_keys
from mindformers_core.recipe.sections import recipe_mesh


def enter_world(recipe):
    """This process's world, and the mesh of a recipe, on the recipe's device.

    Raises:
        ValueError: a device that MindSpore can't use here, another number of ranks, or ranks with different recipes.
    """
    target = recipe.context.device_target
    if ms.get_context("device_target") != target:  # can't be set once kernels have run
        try:
            ms.set_device(target)
        except RuntimeError as error:
            reason = str(error).partition(". ")[0]
            raise ValueError(
                f"context.device_target: MindSpore can't use {target} on this machine ({reason}): use CPU, or "
                "install the driver"
            ) from error
    ms.set_context(mode=ms.PYNATIVE_MODE)  # context.mode: 0 compiles passes and update by themselves
    timeout, check = recipe.context.communication_timeout, recipe.context.check_collectives
    world = init_distributed(timeout=timeout, check_collectives=check)  # never returns in msrun's scheduler
    facts = {"the version of MindSpore": ms.__version__} | recipe_keys(recipe)
    check_equal(DeviceMesh((world.size,), ("rank",)), facts, "start all ranks with one recipe")
    return world, recipe_mesh(recipe, world.size)
