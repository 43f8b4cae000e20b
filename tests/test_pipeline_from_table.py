"""Schedules whose table is given: from a file, by name, and run."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from support.small_pipelines import Scale, array, pipeline

from mindformers_core.communication import init_distributed, shutdown
from mindformers_core.models import LlamaConfig
from mindformers_core.pipeline import PlannedStage, load_table, save_table, schedule_class, schedule_of_table
from mindformers_core.pipeline.schedules.named import SCHEDULES
from mindformers_core.trainer.pipeline_recipe import layers_of_rank
from mindformers_core.trainer.recipe import Parallelism, Recipe


def planned(name, ranks=4, micro_batches=8):
    kind = schedule_class(name)
    return kind.planned(ranks, micro_batches, 2 if kind.placement == "v" else 1)


@pytest.mark.parametrize("suffix", ["csv", "yaml"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_in_a_file_is_the_same_schedule(name, suffix, tmp_path):
    schedule, path = planned(name), str(tmp_path / f"table.{suffix}")
    save_table(schedule.table, path)
    kind = schedule_class(path)
    again = kind.planned(4, 8, schedule.table.stage_num // 4)
    assert again.table == schedule.table


def test_numbers_that_are_not_the_table_s():
    kind = schedule_of_table(planned("1f1b").table)
    with pytest.raises(ValueError, match="the table is for 8 micro-batches, not for 4"):
        kind.planned(4, 4)
    with pytest.raises(ValueError, match="the table is for 4 stages on 4 ranks, not for 2 on 2"):
        kind.planned(2, 8)
    with pytest.raises(ValueError, match="rank 1 of 4 holds the stages .1,. of 4, not .1, 2."):
        kind([PlannedStage(1, 4, 4), PlannedStage(2, 4, 4)], 8)


def test_a_file_that_is_not_there():
    with pytest.raises(FileNotFoundError, match="nowhere.csv"):
        schedule_class("nowhere.csv")


def test_a_placement_that_no_built_in_schedule_has(tmp_path):
    """Stages 0 and 1 on rank 0, 2 and 3 on rank 1."""
    path = tmp_path / "blocks.csv"
    path.write_text("micro_batch_num,1\nstage_ranks,0,0,1,1\nrank 0,F0@0,F0@1,B0@1,B0@0\nrank 1,F0@2,F0@3,B0@3,B0@2\n")
    kind = schedule_class(str(path))
    orders = [" ".join(map(str, order)) for order in kind.planned(2, 1, 2).table.orders]
    assert orders == ["F0@0 F0@1 SF0@1 RB0@1 B0@1 B0@0", "RF0@2 F0@2 F0@3 B0@3 B0@2 SB0@2"]
    sizes = Parallelism(pipeline_parallel=2, pipeline_parallel_interleave_num=2, pipeline_parallel_schedule=str(path))
    recipe = Recipe(LlamaConfig(num_hidden_layers=4), parallelism=sizes)
    assert [[*layers_of_rank(recipe, rank)] for rank in range(2)] == [[0, 1], [2, 3]]


def test_a_table_from_a_file_runs(tmp_path):
    """Backward passes in another order than any built-in schedule's; weights later."""
    path = tmp_path / "mine.csv"
    path.write_text(
        "micro_batch_num,2\nstage_ranks,0,0\nrank 0,F1@0,F0@0,F0@1,F1@1,I1@1,B0@1,I1@0,I0@0,W1@1,W0@0,W1@0\n"
    )
    shutdown()
    init_distributed()
    cells = [Scale(0), Scale(1, is_last=True)]
    schedule = pipeline(cells, 2, schedule_of_table(load_table(str(path))))
    weights = [parameter for stage in schedule.stages for parameter in stage.parameters]
    x = Tensor(array(4, 4))
    truth, expected = ms.value_and_grad(lambda x: ops.mean(cells[1](cells[0](x))), None, weights)(x)
    np.testing.assert_allclose(float(schedule.run(x)), float(truth), 1e-5)
    found = [gradient for stage in schedule.stages for gradient in stage.gradients]
    for gradient, true in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient.asnumpy(), true.asnumpy(), 1e-5, 1e-7)
    shutdown()
