"""The programs of a training job are made with it: what recompute and swap can't do is told before anything is written,
and no program is made twice."""

import numpy as np
import pytest
from mindspore import Tensor
from support.nightly import daily
from support.small_pipelines import Counted, Scale, array, pipeline
from test_training_loop import ONE_RANK, SMALL

from mindformers_core.commands.command_line import main
from mindformers_core.communication import shutdown
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import tensor_meta
from mindformers_core.pipeline import ScheduleLoopedBFS, ScheduleZBV
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recompute import recompute, swap
from mindformers_core.sharding.sharded_tree import ShardedTree
from mindformers_core.tensor_parallel import programs, shard
from mindformers_core.trainer.trainer import Trainer

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No launcher's ranks, and no world yet."""
    shutdown()
    for variable in ("MS_ROLE", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(variable, raising=False)
    yield
    shutdown()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["recompute.select=[layers.0.mlp, layers.*.mlpp]"],
            "recompute.select[1]: 'layers.*.mlpp' matches no Cell or operator: below 'layers.*'"),
        (["recompute.exclude=['*.sofmax']", "recompute.full=true"], "recompute.exclude: '*.sofmax' matches no"),
        (["swap.op_swap={'*.mpl': true}"], "swap.op_swap['*.mpl']: '*.mpl' matches no Cell or operator"),
        (["recompute.budget=0.0001"], "recompute.budget: 0.0001 is out of reach: with all computed again "),
        (
            ["recompute.select=['*.attention']", "swap.op_swap={layers.0.self_attn: true}"],
            "model.layers.0.self_attn.core_attention.Attention of the root Cell (LlamaForCausalLM) is recomputed and",
        ),
        (
            ["recompute.select=['*.attention']", "context.mode=0"],
            "recompute.select: '*.attention' selects operators, but",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
@pytest.mark.parametrize("dry", daily([False], [False, True]), ids=["train", "dry"])
def test_a_run_that_can_not_be_is_told_in_a_line(tmp_path, capsys, overrides, message, dry):
    """As a dry run does; there is no run folder then."""
    folder, cache = tmp_path / "run", tmp_path / "cache"
    places = [f"training.output_dir={folder}", f"train_dataset.cache_dir={cache}", "parallelism.data_parallel_shard=1"]
    assert main(["train", *SMALL, *["--dry-run"] * dry, *places, "--config", ONE_RANK, *overrides]) == 2
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {message}") and "Traceback" not in said
    assert not folder.exists()


@pytest.mark.parametrize("words", [["train", "a.b=1", "--config", ONE_RANK, "--dry"], ["compare", "a", "b", "a.b=1"]])
def test_words_that_no_command_knows(words, capsys):
    with pytest.raises(SystemExit):
        main([*words, "--parallel=2"])
    assert "unrecognized arguments: " in (said := capsys.readouterr().err) and "--parallel=2" in said


@pytest.mark.parametrize(
    "overrides",
    [
        ["recompute.select=['*.attention']", "swap.op_swap={layers.0.mlp.SiLU: true}"],
        ["recompute.budget=0.6"],
        pytest.param(["context.mode=0", "recompute.full=true"], marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def test_the_first_step_finds_its_program(tmp_path, overrides):
    job = Trainer(load_recipe(ONE_RANK, [*SMALL, f"train_dataset.cache_dir={tmp_path}", *overrides]))
    (made,) = programs(job.cells[0])
    job.train_step()
    assert programs(job.cells[0]) == [made]


def test_a_micro_step_asks_for_its_program_once(tmp_path, monkeypatch):
    """Two micro-batches, two keys; the prepared program is that of one call."""
    given = [f"train_dataset.cache_dir={tmp_path}", "training.local_batch_size=2", "training.global_batch_size=4"]
    job, asked, key = Trainer(load_recipe(ONE_RANK, [*SMALL, *given])), [], ShardedTree.key
    monkeypatch.setattr(ShardedTree, "key", lambda tree, *call: asked.append(call) or key(tree, *call))
    job.train_step()
    assert len(asked) == 2
    ids = Tensor(np.zeros((3, 16), np.int32))
    assert job.cells[0](ids, ids)[1].to_local().item() == 48 and len(asked) > 2


def stages(settings, swapped, kind=ScheduleLoopedBFS, compiled=False):
    """A schedule of two stages, here, of which the second one has these settings."""
    mesh = init_device_mesh((1,), ("tp",))
    cells = [shard(Scale(number, number == 1), mesh).set_train() for number in range(2)]
    swap(recompute(cells[1], is_part=True, **settings), is_part=True, **swapped)
    return pipeline(cells, 2, kind=kind, compiled=compiled)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("compiled", [False, True], ids=["PyNative", "compiled"])
def test_a_stage_that_reads_how_often_it_was_called(compiled):
    """Each micro-batch would need a program of its own."""
    mesh = init_device_mesh((1,), ("tp",))
    cells = [shard(Counted(number, number == 1), mesh).set_train() for number in range(2)]
    with pytest.raises(ValueError, match="self.calls has another value at every call, before 2, now 3"):
        pipeline(cells, compiled=compiled).run(Tensor(array(8, 4)))


GIVEN = {stage: ((tensor_meta((2, 4), "float32"),), {}) for stage in range(2)}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("compiled", [False, True], ids=["PyNative", "compiled"])
@pytest.mark.parametrize("kind", [ScheduleLoopedBFS, ScheduleZBV])
def test_the_first_run_finds_the_stages_programs(kind, compiled):
    """Also those of schedules that split backward passes."""
    schedule = stages({"full": True}, {}, kind, compiled)
    schedule.meet().make_programs(schedule.table, GIVEN)
    made = [programs(stage.cell) for stage in schedule.stages]
    assert [len(each) for each in made] == [1, 1]
    schedule.run(Tensor(array(4, 4)))
    assert [programs(stage.cell) for stage in schedule.stages] == made
    schedule.evaluate(Tensor(array(4, 4)))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("settings", "swapped", "message"),
    [
        ({"budget": 0.01, "exclude": "*.tanh"}, {}, "recompute.budget: 0.01 is out of reach"),
        ({"select": "*.mul"}, {"op_swap": {"mul": True}}, "is recomputed and swapped"),
        ({"select": "*.mull"}, {}, r"recompute.select: '\*.mull' matches no Cell or operator"),
    ],
)
def test_what_one_stage_can_not_do_ends_the_preparation(settings, swapped, message):
    schedule = stages(settings, swapped)
    with pytest.raises(ValueError, match=message):
        schedule.meet().make_programs(schedule.table, GIVEN)
    with pytest.raises(ValueError, match=message):  # nor can it run
        schedule.run(Tensor(array(4, 4)))
