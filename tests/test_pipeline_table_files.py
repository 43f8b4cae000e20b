"""Pipeline tables in CSV and YAML files: exact round trips, and errors that name the place."""

import os
import random

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from support.pipeline_random_tables import random_table
from support.small_pipelines import Scale, array, pipeline

from mindformers_core.communication import init_distributed, shutdown
from mindformers_core.models import LlamaConfig
from mindformers_core.pipeline import PlannedStage, schedule_class, schedule_of_table
from mindformers_core.pipeline.schedules.named import SCHEDULES
from mindformers_core.pipeline.tables.lowering import lowered
from mindformers_core.pipeline.tables.step import step_from_text
from mindformers_core.pipeline.tables.table import ScheduleTable
from mindformers_core.pipeline.tables.table_files import load_table, save_table
from mindformers_core.recipe.pipeline import layers_of_rank
from mindformers_core.recipe.sections import Parallelism, Recipe

SUFFIXES = ("csv", "yaml", "yml", "CSV")


def small_table():
    orders = ("F0@0 F1@0 SF0@0 F1@0+B0@0", "RF0@1 I0@1 W0@1")
    return ScheduleTable(tuple(tuple(map(step_from_text, order.split())) for order in orders), (0, 1), 2)


CSV = """micro_batch_num,2
stage_ranks,0,1
rank 0,F0@0,F1@0,SF0@0,F1@0+B0@0
rank 1,RF0@1,I0@1,W0@1
"""
YAML = """micro_batch_num: 2
stage_ranks: [0, 1]
orders:
- [F0@0, F1@0, SF0@0, F1@0+B0@0]
- [RF0@1, I0@1, W0@1]
"""


@pytest.mark.parametrize(("suffix", "text"), [("csv", CSV), ("yaml", YAML)])
def test_what_the_files_look_like(tmp_path, suffix, text):
    path = tmp_path / f"table.{suffix}"
    save_table(small_table(), path)
    assert path.suffix != ".csv" or path.read_text() == str(small_table())
    assert path.read_text() == text
    assert load_table(str(path)) == small_table()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_random_tables_round_trip(tmp_path, suffix):
    path = str(tmp_path / f"table.{suffix}")
    for seed in range(50):
        table = random_table(random.Random(seed))
        for given in (table, lowered(table)):
            save_table(given, path)
            again = load_table(path)
            assert again == given
            assert [type(part) for part in (again.orders, again.orders[0], again.stage_ranks)] == [tuple] * 3
    assert os.listdir(tmp_path) == [f"table.{suffix}"]


@pytest.mark.parametrize(("suffix", "line_num"), [("csv", 4), ("yaml", 5)])
def test_a_rank_is_one_line_however_long(tmp_path, suffix, line_num):
    path = tmp_path / f"table.{suffix}"
    table = small_table()
    save_table(ScheduleTable(tuple(order * 100 for order in table.orders), table.stage_ranks, 2), path)
    assert len(path.read_text().splitlines()) == line_num


def test_a_csv_file_as_spreadsheets_write_it(tmp_path):
    """Byte order mark, other line ends, rows filled up with empty cells; and bubbles drawn as empty cells."""
    path = tmp_path / "table.csv"
    text = CSV.replace("2\n", "2,,,\n").replace("0,1\n", "0,1, ,\n").replace("I0@1,W0@1", ", I0@1 ,,W0@1,,")
    path.write_bytes(b"\xef\xbb\xbf" + (text + ",,,\n").replace("\n", "\r\n").encode())
    assert load_table(path) == small_table()


@pytest.mark.parametrize(
    ("there", "instead", "fault"),
    [
        ("I0@1", "X0@1", r", row 4, column 3: 'X0@1' is no step: write letters, .*, as F3@1"),
        ("F1@0+B0@0", "F1@0+", r", row 3, column 5: 'F1@0\+' is no step"),
        ("num,2", "num,two", r", row 1, column 2: 'two' is no whole number"),
        ("num,2", "num,2,3", r": the row micro_batch_num has 2 numbers, not one"),
        ("num,2", "num", r": the row micro_batch_num has 0 numbers, not one"),
        ("num,2", "num,0", r": micro_batch_num: 0 should be a whole number from 1 on"),
        ("0,1\n", "0,-1\n", r", row 2, column 3: '-1' is no whole number"),
        ("0,1\n", "0,5\n", r": stage_ranks: stage 1 is on rank 5, but the table has orders of 2 rank\(s\)"),
        ("stage_ranks,0,1\n", "", r": there is no row stage_ranks"),
        ("stage_ranks", "stages", r", row 2, column 1: 'stages' should be stage_ranks or rank 0"),
        ("rank 1", "rank 2", r", row 4, column 1: 'rank 2' should be rank 1"),
        ("rank 1", "rank 0", r", row 4, column 1: 'rank 0' should be rank 1"),
        ("rank 1", "", r", row 4, column 1: '' should be rank 1"),
        ("stage_ranks", "micro_batch_num", r", row 2, column 1: 'micro_batch_num' should be stage_ranks or rank 0"),
    ],
)
def test_what_is_wrong_in_a_csv_file(tmp_path, there, instead, fault):
    refused(tmp_path / "table.csv", CSV, there, instead, fault)


@pytest.mark.parametrize(
    ("there", "instead", "fault"),
    [
        ("I0@1", "X0@1", r", orders, rank 1, step 1: 'X0@1' is no step"),
        ("I0@1", "null", r", orders, rank 1, step 1: 'None' is no step"),
        ("[RF0@1, I0@1, W0@1]", "RF0@1", r": orders, rank 1: 'RF0@1' should be a list of steps"),
        ("[0, 1]", "2", r": stage_ranks: 2 should be a list"),
        ("[0, 1]", "[0, one]", r": stage_ranks: stage 1 is on rank 'one'"),
        ("num: 2", "num: two", r": micro_batch_num: 'two' should be a whole number from 1 on"),
        ("orders:", "order:", r": should have the keys micro_batch_num, stage_ranks, orders, not .*, order$"),
        (YAML, "F0@0", r": should have the keys micro_batch_num, stage_ranks, orders, not a str$"),
        ("[0, 1]", "[0, 1", r": while parsing a flow sequence"),
    ],
)
def test_what_is_wrong_in_a_yaml_file(tmp_path, there, instead, fault):
    refused(tmp_path / "table.yaml", YAML, there, instead, fault)


def refused(path, text, there, instead, fault):
    assert there in text
    path.write_text(text.replace(there, instead, 1))
    with pytest.raises(ValueError, match=f"table.{path.suffix[1:]}{fault}"):
        load_table(path)


def test_files_of_another_kind(tmp_path):
    with pytest.raises(ValueError, match=r"table.json': the name should end with .csv or .yaml or .yml"):
        save_table(small_table(), tmp_path / "table.json")
    with pytest.raises(ValueError, match=r"table.txt': the name should end with .csv or .yaml or .yml"):
        load_table(tmp_path / "table.txt")
    (tmp_path / "table.csv").write_bytes(CSV.encode("utf-16"))
    with pytest.raises(ValueError, match=r"table.csv: 'utf-8' codec can't decode"):
        load_table(tmp_path / "table.csv")


def test_what_can_not_be_written_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    save_table(small_table(), path)

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        save_table(lowered(random_table(random.Random(0))), path)
    assert os.listdir(tmp_path) == ["table.csv"]
    assert path.read_text() == CSV


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
