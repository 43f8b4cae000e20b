"""Generation: tokens and logits of the full forward pass without a cache, on any mesh; one program of each pass."""

import numpy as np
import pytest
from mindspore import Tensor
from mindspore.graph import api as graph_api
from small_generation import (
    GREEDY,
    LENGTH,
    PROMPTS,
    V,
    check_against_forward,
    full_forward,
    generated,
    generator_of,
    mesh,
    recipe_of,
    train_on_simulated_ranks,
)

from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.mesh import DeviceMesh
from mindformers_core.serving.prompts import padded
from mindformers_core.serving.sampling import Sampling
from mindformers_core.sharding.inspecting import programs
from mindformers_core.trainer.recipe import Parallelism, recipe_mesh
from mindformers_core.verification import verify


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_on_simulated_ranks(str(tmp_path_factory.mktemp("trained")))


@pytest.fixture(scope="module")
def forward(trained):
    return full_forward(trained)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("mode", "count"), [("context.engine=eager", 12), ("context.engine=generated", 12), ("context.mode=0", 200)]
)
def test_greedy_tokens_are_those_of_the_full_forward_pass(trained, forward, mode, count, monkeypatch):
    """Prompts of four lengths in one batch; one program each of the prompts' pass and of a token's, compiled once."""
    compiled, check = [], graph_api._check_recompile
    monkeypatch.setattr(graph_api, "_check_recompile", lambda *args: (compiled.append(args[3]), check(*args)))
    recipe = recipe_of(*mesh(), mode)
    generator, passes = generator_of(trained, recipe, recipe_mesh(recipe), 0, count)
    tokens = generator.run(PROMPTS, count, GREEDY)
    check_against_forward(forward, tokens, passes)
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


@pytest.mark.parametrize("name", MESHES)
def test_any_mesh_generates_the_same(trained, forward, name):
    """The same tokens on all ranks, logits of the last position where the last stage is; caches are cut."""
    found = generated(trained, *MESHES[name])
    check_against_forward(forward, found[0][0], next(passes for *_, passes, _ in found if passes[0] is not None))
    for tokens, passes, cells in found:
        assert tokens == found[0][0]
        assert all(each is None or each.shape == (4, 256) for each in passes)
        for cell in cells:
            assert len(programs(cell)) == (0 if "eager" in name else 2)
            for path, parameter in cell.parameters_and_names():
                if ".cache." in path:
                    dp, tp = (2 if f"{axis} 2" in name else 1 for axis in ("dp", "tp"))
                    assert parameter.shape == (LENGTH + 16, 4 // dp, 2 // tp, 4)


def test_draws_are_the_same_on_any_mesh(trained):
    """And of a prompt for itself, with its number."""
    drawn = {"sampling": Sampling(temperature=0.9, top_p=0.8, seed=5), "count": 12}
    one = generated(trained, *mesh(), **drawn)[0][0]
    for name in ("dp 2, tp 2", "pp 2, tp 2"):
        assert [tokens for tokens, *_ in generated(trained, *MESHES[name], **drawn)] == [one] * 4
    assert generated(trained, *mesh(), **drawn, prompts=PROMPTS[:1])[0][0] == one[:1]
    assert generated(trained, *mesh(), sampling=Sampling(0.9, 0.8, 6), count=12)[0][0] != one


def test_a_row_ends_after_a_stop(trained):
    whole = generated(trained, *mesh(), count=12)[0][0]
    stop = whole[0][4]

    def work(rank):
        recipe = recipe_of(*mesh())
        generator, passes = generator_of(trained, recipe, recipe_mesh(recipe), rank, 12)
        return generator.run(PROMPTS, 12, GREEDY, stops=(stop,)), len(passes)

    ((rows, passes),) = SimulatedRanks(1).run(work)
    assert rows == [row[: row.index(stop) + 1] if stop in row else row for row in whole]
    assert passes == max(map(len, rows))


@pytest.mark.parametrize("slots", [5, 1])
def test_the_cache_is_verified(slots):
    """`verify`: every tensor of the pass over prompts, and of the pass for a token, on (dp 2, tp 2)."""
    recipe = recipe_of()
    net = recipe.spec.build(recipe.model).set_train(False)
    net.add_caches(2, 9)
    ids, starts = padded([[3] * slots, [7] * max(1, slots - 2)], slots)
    given = Tensor(ids), None, Tensor(np.arange(4, 4 + slots, dtype=np.int32)), Tensor(starts)
    check = verify(net, DeviceMesh((2, 2), ("dp", "tp")), *given, config=Parallelism())
    assert not check.faults, check.report()
    assert check.compared > 500
