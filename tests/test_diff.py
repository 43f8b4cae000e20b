"""Digests of parts, files of a run, tolerances, the report and the command line of `diff`."""

import json
import os

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from support.checkpoint_states import save_after_two
from support.diff_runs import DP, PP, RECIPE, TINY, TP, Planted, recorded, scaled
from support.simulated_ranks import distribute

from mindformers_core import init_device_mesh, shard
from mindformers_core.commands.command_line import main
from mindformers_core.commands.diffing import run_simulated
from mindformers_core.communication.world import process_state
from mindformers_core.diff.digests import COLUMNS, PROJECTIONS, digest, distance, norm_of, sign
from mindformers_core.diff.parting import part
from mindformers_core.diff.recorder import record_digests
from mindformers_core.diff.report import report
from mindformers_core.diff.runs import Run, assembled, layout_text, write_rows, write_table
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.program.observer import Observer
from mindformers_core.recipe.loader import load_recipe

MESH = DeviceMesh((2, 3, 2), ("dp", "cp", "tp"))


def _whole(value):
    return digest(value, (0,) * value.ndim)


def _random_layout(rng):
    """A layout of 3 dims: every axis shards a dim, is partial, varying, or replicates."""
    dims, partial, varying = [[], [], []], [], []
    for axis in rng.permutation(MESH.axis_names):
        choice = rng.integers(0, 6)
        if choice < 3:
            dims[choice].append(axis)
        elif choice == 3:
            partial.append((axis, "sum"))
        elif choice == 4:
            varying.append(axis)
    return Layout.on(MESH, dims, partial, varying)


@pytest.mark.parametrize("seed", range(60))
def test_digests_of_parts_add_up(seed):
    rng = np.random.default_rng(seed)
    placed, value = _random_layout(rng), rng.standard_normal((12, 12, 24))
    terms = {}
    for rank, local in distribute(value, placed, rng).items():
        terms[rank] = digest(local, [part.start for part in placed.local_slices(value.shape, rank)])
    found, expected = assembled(placed, terms), _whole(value)
    replicas = MESH.size // MESH.axis_size(*[a for dim in placed.dims for a in dim], *[a for a, _ in placed.partial])
    assert len(found) == replicas
    for whole in found.values():
        np.testing.assert_allclose(whole[:PROJECTIONS], expected[:PROJECTIONS], rtol=1e-9, atol=1e-9)
        if not placed.partial:
            np.testing.assert_allclose(whole, expected, rtol=1e-9, atol=1e-9)


def test_average_of_terms():
    placed = Layout.on(MESH, [()], [("cp", "avg"), ("tp", "sum")])
    value, rng = np.arange(5.0), np.random.default_rng(0)
    terms = {rank: digest(local, (0,)) for rank, local in distribute(value, placed, rng).items()}
    for whole in assembled(placed, terms).values():
        np.testing.assert_allclose(whole[:PROJECTIONS], _whole(value)[:PROJECTIONS])


def test_a_set_without_all_its_terms_is_left_out():
    placed = layout("dp", None).bind(MESH)
    terms = {rank: digest(np.ones((2, 3)), (0, 0)) for rank in (0, 1, 6)}
    assert list(assembled(placed, terms)) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_positions_count(seed):
    rng = np.random.default_rng(seed)
    value = rng.standard_normal((4, 6, 8))
    for dim in range(3):
        for other in (
            np.roll(value, 1, dim),
            np.flip(value, dim),
            value.take([1, 0, *range(2, value.shape[dim])], dim),
        ):
            assert 0.03 < distance(_whole(value), _whole(other)) / np.linalg.norm(value - other) < 4
    assert distance(_whole(value[:, :4, :4]), _whole(value[:, :4, :4].swapaxes(1, 2))) > 0.1


def test_distance_estimates_the_norm():
    rng, found = np.random.default_rng(0), []
    for _ in range(300):
        value, change = rng.standard_normal((5, 7, 9)), 1e-6 * rng.standard_normal((5, 7, 9))
        found.append(distance(_whole(value), _whole(value + change)) / np.linalg.norm(change))
    assert np.percentile(found, 1) > 0.2
    assert np.percentile(found, 99) < 2.5


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int32, np.bool_])
def test_dtypes_and_blocks(dtype):
    value = (np.random.default_rng(0).standard_normal((700, 300)) * 3).astype(dtype)
    found, exact = _whole(value), value.astype(np.float64)
    assert len(found) == COLUMNS
    np.testing.assert_allclose(found[PROJECTIONS], np.square(exact).sum(), rtol=1e-5)  # in float32 where the array is
    assert found[PROJECTIONS + 1] == np.abs(exact).max()
    parts = digest(value[:350], (0, 0)) + digest(value[350:], (350, 0))
    scale = np.sqrt(found[PROJECTIONS])
    np.testing.assert_allclose(found[:PROJECTIONS], parts[:PROJECTIONS], atol=1e-7 * scale)


def test_what_is_not_finite_is_counted():
    value = np.ones((3, 4), np.float32)
    other = value.copy()
    other[1, 2], other[2, 3] = np.nan, -np.inf
    assert _whole(other)[PROJECTIONS + 2] == 2
    assert distance(_whole(value), _whole(other)) == np.inf
    masked = np.where(np.eye(4, dtype=bool), value.mean(), np.finfo(np.float32).min)
    assert norm_of(_whole(masked)) == 2.0


def test_scalars_and_empty_tensors():
    assert distance(_whole(np.float32(2.0).reshape(())), _whole(np.float32(5.0).reshape(()))) == pytest.approx(3.0)
    assert not digest(np.zeros((0, 3)), (0, 0)).any()


def test_signs_are_those_of_the_global_position():
    signs = sign((6, 8), (0, 0), 1)
    assert set(signs.ravel()) == {-1.0, 1.0}
    np.testing.assert_array_equal(signs[2:4, 4:], sign((2, 4), (2, 4), 1))
    assert (sign((6, 8), (0, 0), 2) != signs).any()


def _run_of(folder, values, rank=0, about=None, layout=None):
    """A recorded run of values: pairs (name, array), as a chain of operators."""
    os.makedirs(folder, exist_ok=True)
    table, inputs = {"about": about or {}, "facts": {}, "rows": []}, []
    for number, (name, array) in enumerate(values):
        facts = {"cell": "mlp", "operator": "Mul", "source": "a.py:1", "hint": name, "inputs": inputs}
        table["facts"][f"mlp#0:{number}.0"] = facts | {"shape": list(array.shape), "dtype": "float32"}
        inputs = [f"mlp#0:{number}.0"]
        table["rows"].append(["value", inputs[0], layout, None])
    write_table(folder, rank, table)
    write_rows(folder, 1, rank, [(n, rank, n, (0, 0), False, _whole(array)) for n, (_, array) in enumerate(values)])
    return Run(folder) if rank == 0 and layout is None else None


def test_tensors_of_which_ranks_lack_parts_are_not_compared(tmp_path):
    layout = layout_text(Layout.on(DeviceMesh((2,), ("tp",)), (("tp",), ())))
    for folder in ("a", "b"):
        for rank in range(2):
            _run_of(tmp_path / folder, [("x", np.ones((4, 5))), ("y", np.ones((2, 3)))], rank, {"ranks": 2}, layout)
    assert "same: 2 tensors" in report(part(*[Run(tmp_path / name) for name in "ab"]))
    write_rows(tmp_path / "b", 1, 1, [(0, 1, 0, (0, 0), False, _whole(np.ones((4, 5))))])
    text = report(part(*[Run(tmp_path / name) for name in "ab"]))
    assert "same as far as compared: 1 tensors" in text and "not compared, for one run or some ranks lack them" in text


def test_the_first_difference_and_its_inputs(tmp_path):
    values = [(name, np.random.default_rng(0).standard_normal((4, 5))) for name in "xyz"]
    one = _run_of(tmp_path / "a", values)
    other = _run_of(tmp_path / "b", [values[0], *((name, array * 1.001) for name, array in values[1:])])
    found = part(one, other)
    assert found.first.key == ("value", 0, "mlp#0:1.0")
    assert (found.agree, sum(each.differs for each in found.last.values())) == (2, 1)  # z differs as much as its input
    text = report(found)
    assert "Cell        'mlp', operator Mul, a.py:1" in text
    assert "value of 'x' (Mul): 0, agrees" in text
    assert part(one, one).first is None


def test_tolerance_of_a_perturbed_run(tmp_path):
    value = np.random.default_rng(0).standard_normal((4, 5))
    one, noisy = (_run_of(tmp_path / str(size), [("x", value * (1 + size))]) for size in (0, 1e-4))
    for size, differs in ((5e-4, False), (5e-3, True)):
        other = _run_of(tmp_path / "other", [("x", value * (1 + size))])
        assert (part(one, other, (one, noisy)).first is not None) == differs
        assert part(one, other).first is not None


def test_operators_that_one_run_alone_has(tmp_path):
    values = [(name, np.ones((4, 5))) for name in "xyz"]
    one = _run_of(tmp_path / "a", values)
    other = _run_of(tmp_path / "b", [values[0], ("y", np.ones((4, 6))), values[2]])
    found = part(one, other)
    assert found.first is None
    assert len(found.only["A"]) == 2
    assert "not compared, for one run or some ranks lack them: 2 of A (mlp); 2 of B (mlp)" in report(found)


def test_steps_with_other_data(tmp_path):
    values = [("x", np.ones((4, 5)))]
    one = _run_of(tmp_path / "a", values, about={"sequences": [[0, 1]]})
    other = _run_of(tmp_path / "b", values, about={"sequences": [[0, 1], [2, 3]]})
    with pytest.raises(ValueError, match="a step of A takes 2 sequences, one of B 4: give both the same global batch"):
        part(one, other)
    swapped = _run_of(tmp_path / "c", values, about={"sequences": [[1, 0]]})
    with pytest.raises(ValueError, match="have no tensor in common in step 1: passes have other sequences"):
        part(one, swapped)
    zigzag = [_run_of(tmp_path / order, values, about={"order": [*map(int, order)]}) for order in ("0312", "05142")]
    with pytest.raises(ValueError, match="have no tensor in common in step 1: passes have tokens in another order"):
        part(*zigzag)


def test_folders_without_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no recorded steps: record a run with monitor.digests=true"):
        Run(tmp_path)
    run = _run_of(tmp_path, [("x", np.ones(3))])
    (tmp_path / "rank_0.json").write_text("{}")
    with pytest.raises(ValueError, match="has no table of recorded tensors"):
        Run(tmp_path)
    (tmp_path / "step_1.rank_0.npy").write_text("no array")
    with pytest.raises(ValueError, match="has no rows of recorded tensors"):
        run.step(1)


@pytest.mark.nightly
def test_pipelines_are_compared_in_their_passes(tmp_path):
    """Two schedules whose backward passes are split; `test_diff_clean` compares a third one with one card."""
    more = "model.num_hidden_layers=4", "train_dataset.seq_length=8", "parallelism.pipeline_parallel_microbatch_size=2"
    name, several = "parallelism.pipeline_parallel_schedule=", "parallelism.pipeline_parallel_interleave_num=2"
    runs = [recorded(tmp_path / each, [*PP, *more, several, name + each]) for each in ("zb_v", "dualpipe_v")]
    found = part(*runs)
    assert found.first is None, report(found)
    assert found.agree == len(runs[0].step(1)) > 500


@pytest.mark.long
def test_a_redistribution_and_the_ranks_of_a_cut_tensor_are_named(tmp_path, monkeypatch):
    one, plain = recorded(tmp_path / "one"), recorded(tmp_path / "a", TP)
    with monkeypatch.context() as patch:
        Planted("model.layers.0.mlp.down_proj", "y_sum", scaled(2.0), (1,)).enter(patch)
        text = report(part(plain, recorded(tmp_path / "b", TP)))
    assert "rank 1 (of 0, 1), layout [-, -, -]\n  behind      [-, -, -] (partial sum: tp) -> " in text
    assert "by all_reduce over tp; the operator's own result agrees" in text
    Planted("model.layers.0.mlp.up_proj", "y", scaled(2.0), (1,)).enter(monkeypatch)
    wrong = recorded(tmp_path / "c", TP)
    assert "in B        ranks 0, 1 together, wrong on 1, layout [-, -, tp]\n" in report(part(plain, wrong))
    assert "in B        ranks 0, 1 together, layout [-, -, tp]\n" in report(part(one, wrong))


class _Mlp(nn.Cell):
    def __init__(self):
        super().__init__()
        draw = np.random.default_rng(0)
        self.up = ms.Parameter(ms.Tensor(draw.standard_normal((8, 4)).astype(np.float32)), name="up")
        self.down = ms.Parameter(ms.Tensor(draw.standard_normal((4, 8)).astype(np.float32)), name="down")
        self.norm = nn.LayerNorm((8,))  # two of its three results have no gradient

    def construct(self, x):
        return ops.dense(ops.relu(self.norm(ops.dense(x, self.up))), self.down).sum()


@pytest.mark.usefixtures("one_rank")
def test_own_training_loop(tmp_path):
    for name, factor in (("a", 1.0), ("b", 1.001)):
        with record_digests(tmp_path / name, note=name) as recording:
            net = shard(_Mlp(), init_device_mesh((1,), ("dp",)))
            step = ms.value_and_grad(net, None, net.trainable_params())
            for number in range(2):
                x = ms.Tensor(np.full((2, 4), factor if number else 1.0, np.float32))
                loss, gradients = step(x)
                for parameter, gradient in zip(net.trainable_params(), gradients):
                    recording.held("gradient of the loop", gradient, parameter)
                recording.end_step()
            with pytest.raises(ValueError, match="this rank is recorded already"), record_digests(tmp_path / "c"):
                pass
        assert type(process_state().observer) is Observer
    found = part(Run(tmp_path / "a"), Run(tmp_path / "b"))
    assert found.steps == [1, 2]
    assert found.first.key[2].startswith("input x.0")
    assert {key[0] for key in Run(tmp_path / "a").step(1)} == {"value", "gradient", "gradient of the loop"}


@pytest.mark.long
def test_command_line(tmp_path, capsys):
    kept = [str(tmp_path / "kept" / side) for side in ("a", "b", "perturbed")]

    def diff(one, *arguments):
        return main(["diff", one, RECIPE, "--steps", "1", *TINY[:-1], *arguments])

    assert diff(RECIPE, "b:parallelism.tensor_parallel=2", "--keep", str(tmp_path / "kept")) == 0
    assert "same: 409 tensors of step 1 agree" in capsys.readouterr().out
    assert main(["diff", kept[0], kept[1], "--perturbed", kept[2]]) == 0
    assert main(["diff", kept[0], kept[1]]) == 0
    assert diff(kept[0], "b:model.rms_norm_eps=1e-3", "--perturbed", kept[2]) == 1
    assert "the first  value of 'RMSNorm', float32 [4, 16, 32], forward pass 0" in capsys.readouterr().out
    assert main(["diff", kept[0], kept[1], "a:training.seed=1"]) == 2
    assert "is recorded already: a:section.key=value is for a recipe" in capsys.readouterr().err
    assert main(["diff", kept[0], str(tmp_path / "nothing.yaml")]) == 2
    larger = "b:training.local_batch_size=8", "b:training.global_batch_size=16"
    assert diff(kept[0], *larger, "--perturbed", kept[2]) == 2
    assert "give both the same global batch" in capsys.readouterr().err


def test_compare_points_to_diff(tmp_path, capsys):
    for name, loss in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss}) + "\n")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "python -m mindformers_core diff A B" in capsys.readouterr().out


@pytest.mark.long
def test_resumed_run(tmp_path):
    """A checkpoint's moments are those of the run that goes on."""
    whole = recorded(tmp_path / "whole", steps=3)
    recipe = load_recipe(RECIPE, [*TINY, f"training.output_dir={tmp_path / 'saved'}"])
    run_simulated(recipe, 2, save_after_two)
    resumed = recorded(tmp_path / "resumed", [f"checkpoint.load_path={tmp_path / 'saved'}"])
    assert resumed.steps == [3]
    found = part(whole, resumed)
    assert found.steps == [3]
    assert found.first is None, report(found)


def test_recording_changes_no_number(tmp_path):
    rows = []
    for digests in ("true", "false"):
        recipe = load_recipe(RECIPE, [*TINY[:-1], *DP, f"training.output_dir={tmp_path}", f"monitor.digests={digests}"])
        rows.append([[(row["loss"], row["gradient_norm"]) for row in each] for each in run_simulated(recipe, 2)])
    assert rows[0] == rows[1]
