"""Generation: tokens and logits of the full forward pass without a cache, on any mesh; one program of each pass."""

import numpy as np
import pytest
from mindspore import Tensor
from mindspore.graph import api as graph_api
from support.nightly import daily
from support.small_generation import (
    DRAWN,
    GREEDY,
    LENGTH,
    PROMPTS,
    TRAINED,
    V,
    check_against_forward,
    full_forward,
    generated,
    generator_of,
    mesh,
    recipe_of,
    train,
)

from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.mesh import DeviceMesh
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.recipe.sections import Parallelism, recipe_mesh
from mindformers_core.serving.prompts import padded
from mindformers_core.sharding.inspecting import programs
from mindformers_core.verification import verify

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return trained_in(str(tmp_path_factory.mktemp("trained")), 4, *TRAINED)


def trained_in(folder, ranks, *overrides):
    with custom_gradients():
        SimulatedRanks(ranks).run(lambda rank: train(folder, rank, *overrides, steps=1))
    return folder


@pytest.fixture(scope="module")
def forward(trained):
    return full_forward(trained)


@pytest.fixture(scope="module")
def one_card(trained):
    """What is generated on one rank."""
    return generated(trained, *mesh())[0]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("mode", "count"),
    [
        pytest.param("context.engine=eager", 8, marks=pytest.mark.nightly),  # "tp 2, eager" is daily
        ("context.engine=generated", 10),
        ("context.mode=0", 20),
    ],
)
def test_greedy_tokens_are_those_of_the_full_forward_pass(request, tmp_path, mode, count, monkeypatch):
    """Prompts of four lengths in one batch; one program each of the prompts' pass and of a token's, compiled once."""
    few = [*mesh(), "model.num_hidden_layers=2"] if "mode" in mode else []  # each of which is compiled
    trained = trained_in(str(tmp_path), 1, *few) if few else request.getfixturevalue("trained")
    compiled, check = [], graph_api._check_recompile
    monkeypatch.setattr(graph_api, "_check_recompile", lambda *args: (compiled.append(args[3]), check(*args)))
    recipe = recipe_of(*mesh(), mode, *few)
    generator, passes = generator_of(trained, recipe, recipe_mesh(recipe), 0, count)
    tokens = generator.run(PROMPTS, count, GREEDY)
    check_against_forward(full_forward(trained, *few), tokens, passes)
    programs_made = 0 if "eager" in mode else 2
    assert len(programs(generator.stages[0].cell)) == programs_made
    assert len(compiled) == (2 if "mode" in mode else 0), compiled
    again = [*reversed(PROMPTS)]  # the caches are written over
    assert generator.run(again, 8, GREEDY) == [row[:8] for row in tokens[::-1]]
    assert len(programs(generator.stages[0].cell)) == programs_made
    assert len(compiled) == (2 if "mode" in mode else 0), compiled


MESHES = {
    "tp 2": mesh(tp=2),
    "tp 2, eager": [*mesh(tp=2), "context.engine=eager"],
    "dp 2, tp 2": mesh(dp=2, tp=2),
    "pp 2, tp 2": mesh(pp=2, tp=2, sequence_parallel="true"),
    "pp 2 in a V": V,
    "pp 2, interleaved": mesh(pp=2, pipeline_parallel_schedule="interleaved_1f1b", pipeline_parallel_interleave_num=2),
}


@pytest.mark.parametrize("name", daily(["pp 2 in a V"], MESHES))
def test_any_mesh_generates_the_same(trained, forward, one_card, name):
    """The same tokens on all ranks, logits of the last position where the last stage is; caches are cut."""
    found = generated(trained, *MESHES[name])
    check_against_forward(forward, found[0][0], next(passes for *_, passes, _ in found if passes[0] is not None))
    for greedy, drawn, passes, cells in found:
        assert (greedy, drawn) == one_card[:2]
        assert all(each is None or each.shape == (4, 257) for each in passes)
        for cell in cells:
            assert len(programs(cell)) == (0 if "eager" in name else 2)
            for path, parameter in cell.parameters_and_names():
                if ".cache." in path:
                    dp, tp = (2 if f"{axis} 2" in name else 1 for axis in ("dp", "tp"))
                    assert parameter.shape == (LENGTH + 10, 4 // dp, 2 // tp, 4)


def test_a_prompt_for_itself_and_a_stop(trained, one_card):
    """The tokens of a batch's first prompt are those that it has alone; a row ends after a stop."""
    greedy, drawn, *_ = one_card
    stop, recipe = greedy[0][4], recipe_of(*mesh())

    def work(rank):
        generator, passes = generator_of(trained, recipe, recipe_mesh(recipe), rank, 10, PROMPTS[:1])
        drawn_alone = generator.run(PROMPTS[:1], 5, DRAWN)
        return drawn_alone, generator.run(PROMPTS[:1], 10, GREEDY, stops=(stop,)), len(passes) - 5

    ((alone, (row,), passes),) = SimulatedRanks(1).run(work)
    assert alone == drawn[:1] and alone[0] != greedy[0][:5]
    assert row == greedy[0][: greedy[0].index(stop) + 1]
    assert passes == len(row)


@pytest.mark.parametrize("slots", daily([5], [5, 1]))
def test_the_cache_is_verified(slots):
    """`verify`: every tensor of the pass over prompts, and of the pass for a token, on (dp 2, tp 2)."""
    recipe = recipe_of("model.num_hidden_layers=2")
    net = recipe.spec.build(recipe.model).set_train(False)
    net.add_caches(2, 9)
    ids, starts = padded([[3] * slots, [7] * max(1, slots - 2)], slots)
    given = Tensor(ids), None, None, None, Tensor(np.arange(4, 4 + slots, dtype=np.int32)), Tensor(starts)
    check = verify(net, DeviceMesh((2, 2), ("dp", "tp")), *given, config=Parallelism())
    assert not check.faults, check.report()
    assert check.compared > 500
