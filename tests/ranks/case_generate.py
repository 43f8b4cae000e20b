"""Trained on (dp 2, tp 2), generated on 1, 2 and 4 ranks: tokens and logits of the full forward pass."""

import os
import shutil
import tempfile

from support.launch import on_ranks
from support.small_generation import (
    DRAWN,
    GREEDY,
    PROMPTS,
    TRAINED,
    check_against_forward,
    full_forward,
    generator_of,
    mesh,
    recipe_of,
    train,
)

from mindformers_core.communication import world
from mindformers_core.communication.messages import gather_values
from mindformers_core.mesh import init_device_mesh
from mindformers_core.recipe.sections import MESH_AXES

COUNT, LAYERS = 12, "model.num_hidden_layers=2"


def folder_of_launch():
    return os.path.join(tempfile.gettempdir(), f"mindformers_core_case_generate_{os.environ['MS_SCHED_PORT']}")


@on_ranks(nightly=(4,))
def case_generated_on_other_meshes_than_trained(mode=1):
    """Greedy and drawn tokens on (pp 2, tp 2), cp 2, whose ranks compute alike, and one rank; logits of a prompt a
    rank. By day, on simulated ranks and compiled: `test_generate.py`."""
    folder, me = folder_of_launch(), world().rank
    job = train(folder, me, *TRAINED, LAYERS)
    gather_values(job.mesh, None)
    forward, found, checked = full_forward(folder, LAYERS), [], 0

    def generate(ranks, **sizes):
        nonlocal checked
        recipe = recipe_of(*mesh(**sizes), f"context.mode={mode}", LAYERS)
        here = init_device_mesh([sizes.get(axis, 1) for axis in MESH_AXES], MESH_AXES, ranks)
        generator, passes = generator_of(folder, recipe, here, me, COUNT)
        found.append([generator.run(PROMPTS, COUNT, GREEDY), generator.run(PROMPTS, 10, DRAWN)])
        if passes[0] is not None:
            check_against_forward(forward, found[-1][0], passes[:COUNT], [me])
            checked += 1

    generate(None, pp=2, tp=2)
    if me < 2:
        generate([0, 1], cp=2)
    elif me == 2:
        generate([2])
    every = gather_values(job.mesh, (found, checked))
    assert [checked for _, checked in every.values()] == [1, 1, 2, 1]
    assert all(each == found[0] for on_rank, _ in every.values() for each in on_rank)
    assert found[0][1] != [row[:10] for row in found[0][0]]
    if me == 0:
        shutil.rmtree(folder)


@on_ranks(nightly=(4,))
def case_generated_in_a_compiled_pipeline():
    """The same where each stage's pass is a graph."""
    case_generated_on_other_meshes_than_trained(0)


@on_ranks(2)
def case_generated_in_a_pipeline():
    """Of weights that were trained on tp 2, the likeliest tokens."""
    folder, me = folder_of_launch(), world().rank
    job = train(folder, me, *mesh(tp=2), LAYERS)
    gather_values(job.mesh, None)
    ranks = init_device_mesh((2, 1, 1, 1), MESH_AXES)
    generator, passes = generator_of(folder, recipe_of(*mesh(pp=2), LAYERS), ranks, me, COUNT)
    found = gather_values(job.mesh, generator.run(PROMPTS, COUNT, GREEDY))
    assert found[0] == found[1] and (passes[0] is None) == (me == 0)
    if me == 1:
        check_against_forward(full_forward(folder, LAYERS), found[1], passes)
    gather_values(job.mesh, None)
    if me == 0:
        shutil.rmtree(folder)
