"""Programs in the run folder: a job that is started again plans and generates none again, but those that differ."""

import json
import shutil
from types import SimpleNamespace

import pytest
from mindspore import Parameter, Tensor, nn, ops
from support.nightly import daily
from test_trainer import ONE_RANK, SMALL, rows_of

from mindformers_core import Trainer
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.communication.world import rank_of
from mindformers_core.data.reading import micro_batch
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import register_operator, registry, tensor_meta
from mindformers_core.operators.saved import NOTHING
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import recipe_mesh
from mindformers_core.redistribution.device_model import GPU
from mindformers_core.sharding import plan_passes, program
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import prepare, shard
from mindformers_core.trainer import kept_programs
from mindformers_core.trainer.cells import build_cells
from mindformers_core.trainer.kept_programs import KeptPrograms

pytestmark = pytest.mark.long


@pytest.fixture
def made(monkeypatch):
    """The names of what is planned and generated, a list."""
    names = []

    def listed(module, name):
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **more: names.append(name) or function(*given, **more))

    listed(plan_passes, "propagate")
    listed(program, "write_module")
    return names


def same(one, other):
    """Assert that two programs are the same, of captures that are the same."""
    for name in ("text", "sites", "observed"):
        assert getattr(one.source, name) == getattr(other.source, name), name
    pairs = dict(zip(one.source.functions, other.source.functions, strict=True))
    assert list(one.source.functions.values()) == list(other.source.functions.values())
    assert all(mine.price == theirs.price and mine.graph.key == theirs.graph.key for mine, theirs in pairs.items())
    for name in ("borrowed", "deferrals"):
        mine, theirs = getattr(one.source, name), getattr(other.source, name)
        assert [pairs[plan] for plan in mine] == list(theirs), name
    assert [*one.source.borrowed.values()] == [*other.source.borrowed.values()]
    numbers = [[sorted(each.places.values()) for each in one.source.deferrals.values()] for one in (one, other)]
    assert numbers[0] == numbers[1]
    kept = [[(str(graph.source), graph.name) for _, graph in one.source.kept] for one in (one, other)]
    assert kept[0] == kept[1] and [pairs[plan] for plan, _ in one.source.kept] == [p for p, _ in other.source.kept]
    constants = one.source.constants, other.source.constants
    assert [{name: (each.digest, each.value) for name, each in some.items()} for some in constants[:1]] == [
        {name: (each.digest, each.value) for name, each in some.items()} for some in constants[1:]
    ]


RECIPES = {
    "zero": (), "recompute": (), "pp": (), "cp": ("parallelism.context_parallel_algorithm=ring",),
    "cpu_1p": ("context.mode=0", "recompute.full=true"),
}  # fmt: skip


@pytest.mark.parametrize("name", daily(["pp", "cp", "cpu_1p"], RECIPES))  # what no other daily one has
def test_programs_of_recipes(tmp_path, made, name):
    """Of all stages of a rank, and again."""
    recipe = load_recipe(str(ONE_RANK).replace("cpu_1p", name), RECIPES[name])
    mesh, found = recipe_mesh(recipe), []
    for _ in range(2):
        made.clear()
        with rank_of(mesh.size, mesh.size - 1):
            kept, cells = KeptPrograms(tmp_path, 0), build_cells(recipe, mesh, mesh.size - 1)
            for stage, net in cells.items():
                tree_of(net).kept = kept
                if name == "pp":
                    tree_of(net).deferring, tree_of(net).deferred_gradients = True, SimpleNamespace(attach=id)
                given = micro_batch(recipe, net, stage)
                found.append(prepare(net, *given, compiled=recipe.context.mode == 0))
            kept.write()
    assert made == [], "the second time"
    for one, other in zip(found[: len(cells)], found[len(cells) :]):
        same(one, other)


class Doubling(nn.Cell):
    """Has a constant, an attribute that it sets to a tensor, and an operator of the user's."""

    def __init__(self, size=8):
        super().__init__()
        self.weight, self.table = Parameter(ops.ones((8, size))), Tensor([2.0] * size)
        self.seen = None

    def construct(self, x):
        self.seen = ops.matmul(x, self.weight)
        return ops.relu(self.seen) * self.table


def doubled(folder, rows=4, size=8, axis="dp", ranks=(0, 1, 2, 3), device_model=None, defers=False):
    """What is told of a `Doubling` whose programs are kept in a folder, and its program."""
    kept, mesh = folder and KeptPrograms(folder, 0), init_device_mesh((2, 2), ("dp", "tp"), ranks)
    net = shard(Doubling(size), mesh, plan={"": {"input": layout(axis)}}, device_model=device_model)
    tree_of(net).kept, tree_of(net).deferring = kept, defers
    tree_of(net).deferred_gradients = SimpleNamespace(attach=id)
    made = prepare(net, tensor_meta((rows, 8), "float32"))
    if kept:
        kept.write()
    return made


CHANGES = {
    "nothing": (lambda patch: {}, 0),
    "how gradients of weights are computed": (lambda patch: {"defers": True}, 1),
    "shapes": (lambda patch: {"rows": 6}, 2),
    "the model": (lambda patch: {"size": 12}, 2),
    "layouts": (lambda patch: {"axis": "tp"}, 2),
    "ranks": (lambda patch: {"ranks": (0, 2, 1, 3)}, 2),
    "the device model": (lambda patch: {"device_model": GPU}, 2),
    "MindSpore": (lambda patch: patch.setattr(kept_programs.ms, "__version__", "99") or {}, 2),
    "this package": (lambda patch: patch.setattr(kept_programs, "_PACKAGE", kept_programs._PACKAGE / "data") or {}, 2),
    "lines of the source": (lambda patch: patch.setattr(Doubling, "construct", _written_elsewhere) or {}, 2),
}


def _written_elsewhere(self, x):
    self.seen = ops.matmul(x, self.weight)
    return ops.relu(self.seen) * self.table


@pytest.mark.usefixtures("rank_0_of_4")
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_made_anew(tmp_path, made, monkeypatch, capsys, change):
    before = doubled(tmp_path)
    made.clear()
    assert capsys.readouterr().out == "", "of the first start"
    edit, count = CHANGES[change]
    again = doubled(tmp_path, **edit(monkeypatch))
    assert len(made) == count
    said = capsys.readouterr().out
    assert said.startswith(f"plans and generated modules: {2 - count} taken from {tmp_path}/programs/rank_0")
    assert (f", {count} made anew: none fits" in said) == (count > 0)
    if not count:
        same(before, again)


@pytest.mark.parametrize("plans, count", [({}, 1), (None, 4)])
def test_simulated_ranks_share_plans(tmp_path, made, plans, count):
    """Where a dict is given for them; `verify` gives none, so that it sees a rank that plans otherwise."""
    SimulatedRanks(4, plans=plans).run(lambda rank: doubled(None))
    assert sorted(made) == [*["propagate"] * count, *["write_module"] * 4]


@pytest.mark.usefixtures("rank_0_of_4")
@pytest.mark.parametrize("kind", ["plan", "source"])
@pytest.mark.parametrize("damage", ["a bit", "empty", "bytes", "a folder"])
def test_a_damaged_file_is_told_and_made_anew(tmp_path, made, capsys, kind, damage):
    before = doubled(tmp_path)
    (file,) = (tmp_path / "programs" / "rank_0").glob(f"{kind}_*")
    whole = file.read_bytes()
    bit = whole.replace(b"trained: %1", b"trained: %2").replace(b"relu", b"silu", 1)
    text = {"empty": b"", "a bit": bit, "bytes": b"\xff\xfe\x00"}.get(damage)
    if damage == "a folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(text)
    made.clear()
    same(before, doubled(tmp_path))
    assert made == [{"plan": "propagate", "source": "write_module"}[kind]]
    said = capsys.readouterr().out
    assert said.count("warning: ") == 1 + (damage == "a folder") and f"{file}" in said and "made anew" in said
    assert damage == "a folder" or file.read_bytes() == whole


@pytest.mark.usefixtures("rank_0_of_4")
def test_another_device_model_in_a_file(tmp_path, made, capsys):
    """It is no part of the listing of the plan."""
    doubled(tmp_path)
    (file,) = (tmp_path / "programs" / "rank_0").glob("plan_*.json")
    data = json.loads(file.read_text())
    data["device_model"]["operations_per_second"] += 1
    file.write_text(json.dumps(data))
    made.clear()
    doubled(tmp_path)
    assert made == ["propagate"] and "is damaged: it has another device model" in capsys.readouterr().out


@pytest.mark.usefixtures("rank_0_of_4")
def test_a_full_disk(tmp_path, made, monkeypatch, capsys):
    """Nothing is kept, which is told once, and the run goes on."""

    def full(*_):
        raise OSError(28, "No space left on device", str(tmp_path))

    monkeypatch.setattr(kept_programs, "save_plan", full)
    monkeypatch.setattr(kept_programs, "save_source", full)
    doubled(tmp_path)
    assert capsys.readouterr().out.count("warning: [Errno 28] No space left on device") == 1
    monkeypatch.undo()
    assert len(made) == 2


@pytest.mark.usefixtures("rank_0_of_4")
def test_the_code_of_an_operator_of_the_users(tmp_path, made, monkeypatch):
    """A file of its rule that has changed is another key, though the rule gives the same."""
    monkeypatch.setitem(registry._FACTS, "ReLU", registry._FACTS["ReLU"])
    code = "from mindformers_core.operators import elementwise\n\ndef rule(input):\n    return elementwise(input)\n"
    counts = []
    for text in (code, code, f"{code}# changed\n"):
        (file := tmp_path / "rule.py").write_text(text)
        space = {}
        exec(compile(text, str(file), "exec"), space)
        monkeypatch.delitem(registry._FACTS, "ReLU")
        register_operator("ReLU", saves=NOTHING)(space["rule"])
        made.clear()
        doubled(tmp_path / "run")
        counts.append(len(made))
    assert counts == [2, 0, 2]


@pytest.mark.usefixtures("one_rank")
def test_a_job_that_is_started_again(tmp_path, made, capsys):
    """It resumes, or begins anew where there is no checkpoint: no program is made again, and numbers are the same."""
    options = [
        *SMALL,
        "training.steps=4",
        f"train_dataset.cache_dir={tmp_path / 'cache'}",
        f"training.output_dir={tmp_path / 'run'}",
    ]
    options += [f"evaluation.dataset={{data_path: [{__file__}]}}", "evaluation.interval=2", "evaluation.samples=2"]
    saving = "checkpoint.enable_save=true", "checkpoint.save_interleaved_steps=2"
    Trainer(ONE_RANK, *options, *saving).run()
    rows, first = rows_of(tmp_path / "run"), len(made)
    assert first >= 4, "of training and evaluation"
    made.clear()
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step_4")
    Trainer(ONE_RANK, *options, *saving, "training.resume=auto").run()
    assert made == [] and f" {first} taken" not in (said := capsys.readouterr().out) and "loaded" in said
    numbers = [[(row["step"], row["loss"], row["gradient_norm"], row.get("eval_loss")) for row in some]
               for some in (rows, rows_of(tmp_path / "run"))]  # fmt: skip
    assert numbers[0] == numbers[1] and len(rows) == 4
    Trainer(ONE_RANK, *options).run()
    assert made == [] and "an earlier run was moved to" in capsys.readouterr().out
    assert not (tmp_path / "run.1" / "programs").exists() and (tmp_path / "run" / "programs" / "rank_0").is_dir()
    Trainer(ONE_RANK, *options, "model.hidden_size=64")
    assert made == ["propagate", "write_module"]
