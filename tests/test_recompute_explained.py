"""What `explain()` shows of recompute and swap: marks whose bytes add up; what runs again is sent again."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from models import TINY_LLAMA
from support.nightly import daily
from support.recomputed_models import INPUTS, Net, llama, sharded
from support.saved_tensors import saved_activations, saved_bytes
from support.small_cells import cell_of

from mindformers_core.analysis.forward_trace import Memory
from mindformers_core.analysis.prediction import Prediction
from mindformers_core.analysis.traffic import collectives_of
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication import init_distributed, shutdown
from mindformers_core.explaining.report import make_report
from mindformers_core.hints import bytes_shown
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.operators import tensor_meta
from mindformers_core.program.plan import called_cells
from mindformers_core.recompute import list_operators, recompute, swap, write_curve
from mindformers_core.recompute.explained import bytes_not_kept, keepers_by_key
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import explain, prepare, programs, shard
from mindformers_core.zero import hsdp, value_and_grad

IDS = tensor_meta((2, 8), "int32")
pytestmark = pytest.mark.usefixtures("one_rank")


def explained(net, plan, path=""):
    return tree_of(net).activations.explained(plan, path)


def rows_of(report):
    """The rows of all calls; of equal ones as often as they are called."""
    for row in report.rows:
        yield row
        if row.report is not None:
            yield from rows_of(row.report)


MARKED = [
    (llama, {"full": True}),
    (llama, {"full": "1", "select": "*.attention", "exclude": "layers.1.mlp.Mul"}),
    (llama, {"select": ["*.Rotary", "*.MatMul", "*.SiLU"]}),
    (llama, {"budget": 0.5}),
    (Net, {"full": True}),
    (Net, {"budget": 0.5}),
]


@pytest.mark.parametrize(("make", "settings"), daily([*MARKED[1:3], MARKED[4]], MARKED))
def test_the_marks_add_up(make, settings):
    """Whatever runs again has one; what isn't kept, less what is kept instead, is what is saved in all."""
    net, inputs = recompute(sharded(make), **settings), INPUTS[make]()
    plan = prepare(net, *inputs).plan
    found, dropped = explained(net, plan), frozenset(keepers_by_key(plan))
    marks = found.notes
    assert found.dropped == dropped
    again = {key for key, mark in marks.items() if mark.kind == "recomputed"}
    assert again == Prediction(plan, algorithm_of).recomputed(frozenset(dropped))
    before, after = (saved_bytes(plan, keys, algorithm_of) for keys in (frozenset(), dropped))
    signs = {"recomputed": 1, "kept for others": -1}
    assert sum(signs[mark.kind] * mark.nbytes for mark in marks.values()) == before - after > 0
    rows = list(rows_of(make_report(plan, algorithm_of, found).root))
    assert sum(getattr(row, "note", None) is not None for row in rows) == len(marks)


def test_a_mark_has_the_bytes_that_are_listed(tmp_path):
    """Of an operator of which only the result was kept; the same on the page, and in the part of a Cell."""
    inputs = INPUTS[llama]()
    listed = {entry.name: entry.saved_bytes for entry in list_operators(sharded(llama), *inputs)}
    net = swap(recompute(sharded(llama), select="layers.1.mlp.SiLU"), op_swap={"layers.2.mlp.SiLU": True})
    assert listed["model.layers.1.mlp.SiLU"] == 4096
    net(*inputs)
    lines = explain(net, html=tmp_path / "page.html").splitlines()
    marked = [line for line in lines if re.search(r"  \[.*: .*\]$", line)]
    assert [re.sub(r"^ *%\d+ = (\w+)\(.*  \[", r"\1 [", line) for line in marked] == [
        "SiLU [recomputed: 4.0 KiB not kept]",
        "SiLU [on host: 4.0 KiB]",
    ]
    assert all(len(line) == 120 for line in marked)
    assert "  model.layers.1.mlp: SiLU" in lines
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count('<span class="mark recomputed">↻ recomputed: 4.0 KiB not kept</span>') == 1
    assert page.count('<span class="mark on-host">⇅ on host: 4.0 KiB</span>') == 1
    assert '<details open="" class="card stored">' in page or '<details class="card stored" open="">' in page
    part = explain(net.model.layers["2"].mlp)
    assert part.count("[on host: 4.0 KiB]") == 1 and "recomputed" not in part
    plain = sharded(llama)
    assert "[" + "recomputed" not in explain(plain, *inputs, html=tmp_path / "page.html")
    assert '"mark' not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_what_waits_on_the_host():
    net = swap(sharded(llama), swap=True)
    plan = prepare(net, *INPUTS[llama]()).plan
    found = explained(net, plan)
    keys = keepers_by_key(plan).keys()
    assert {mark.kind for mark in found.notes.values()} == {"on host"}
    swapped = [tensor.nbytes for tensor in saved_activations(plan, algorithm=algorithm_of) if tensor.key in keys]
    assert sum(mark.nbytes for mark in found.notes.values()) == sum(swapped) > 0
    (line,) = found.lines
    assert line.startswith(f"swap: results of {len(found.notes)} instructions wait on the host, ")
    key = next(key for key, path in called_cells(plan) if path == "model.layers.1.self_attn")
    inside = {inner[len(key) :] for inner in found.notes if inner[: len(key)] == key}
    assert explained(net, plan, "model.layers.1.self_attn").notes.keys() == inside != set()


def llama_on_two_ranks():
    """Two layers, cut over the ranks of a world in which nothing is sent, until the test ends."""
    shutdown()
    init_distributed("fake", world_size=2)
    net = LlamaForCausalLM(LlamaConfig(**TINY_LLAMA, num_hidden_layers=2)).set_train()
    return shard(net, init_device_mesh((1, 2), ("dp", "tp")))


def test_what_is_sent_again():
    """A redistribution that runs again sends its bytes once more, in the backward pass; all else sends what it did."""
    counts = []
    for settings in ({}, {"full": True}, {"full": True, "mp_comm_recompute": False}):
        net = recompute(llama_on_two_ranks(), **settings)
        plan = prepare(net, IDS, IDS).plan
        found = explained(net, plan)
        rows = [row for row in rows_of(make_report(plan, algorithm_of, found).root) if hasattr(row, "steps")]
        again = [step for row in rows if getattr(row, "note", None) for step in row.steps if step.recomputed]
        sent = collectives_of(make_report(plan, algorithm_of, found).traffic)
        counts.append((sent, [name for step in again for way, name, _ in step.collectives if way == "forward"]))
    (plain, none), (full, again), (kept, nothing) = counts
    assert (none, nothing) == ([], []) and kept == plain
    assert again and all(full[name] == (plain[name][0], plain[name][1] + again.count(name)) for name in plain)


def test_a_compiled_cell_that_runs_again_has_a_mark(tmp_path):
    """Of the program of a compiled step; where equal ones are shown once, too, and in the part of one of them."""
    net = recompute(sharded(llama), full="0-1", select="layers.2.mlp")
    value_and_grad(hsdp(net), compiled=True).prepare(IDS, IDS)
    lines = explain(net, html=tmp_path / "page.html").splitlines()
    marked = [line.split() for line in lines if "[recomputed whole: " in line]
    assert [(words[0], words[-6:-4], words[-2:]) for words in marked] == [
        ("layers.0", ["[recomputed", "whole:"], ["not", "kept]"]),
        ("layers.1", ["[recomputed", "whole:"], ["not", "kept]"]),
        ("mlp", ["[recomputed", "whole:"], ["not", "kept]"]),
    ]
    assert all(len(line) <= 120 for line in lines)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count('<span class="mark recomputed">↻ recomputed whole: ') == 3
    part = explain(net.model.layers["2"].mlp).splitlines()
    (line,) = [line for line in part if ".mlp  GatedMLP " in line]
    assert "[recomputed whole: " in line


def test_what_is_held_at_the_peak_of_the_forward_pass():
    """Less with recompute, and as before with what changes nothing; what is held in its place counts, and evaluation
    is what it was."""
    inputs, peaks = INPUTS[llama](), []
    for settings in ({}, {"select": "*.mlp.SiLU"}, {"select": ["*.mlp.Mul", "*.mlp.SiLU"]}, {"full": True}):
        net = recompute(sharded(llama), **settings)
        plan = prepare(net, *inputs).plan
        report = make_report(plan, algorithm_of, explained(net, plan))
        peaks.append(report.training_bytes)
        assert report.evaluation_bytes == make_report(plan, algorithm_of).evaluation_bytes
        assert report.undropped_bytes == (peaks[0] if settings else None)
        text = explain(net, *inputs)
        assert ("at the peak of the forward pass: " in text) == bool(settings)
        assert (f"in training ({bytes_shown(peaks[0])} without\nrecompute and swap), " in text) == bool(settings)
    assert sorted(peaks, reverse=True) == peaks and len(set(peaks)) == 4


@pytest.mark.parametrize(
    ("select", "held"),
    [  # in results of 64 bytes: at the end all but the view, which is none
        ("none", 5),
        (".Mul", 4),
        (".Cos", 5),  # held as the view
        ([".Cos", ".Reshape"], 4),
        ([".Mul", ".Cos", ".Reshape"], 3),
    ],
)
def test_what_dropped_results_leave_behind(select, held):
    """By five operators in a row, and a view."""

    def chain(self, x):
        exponent = ops.exp(x)
        scaled = ops.mul(exponent, self.weight)
        seen = ops.reshape(ops.cos(scaled), (4, 4))
        return ops.tanh(ops.sin(seen))

    cell = cell_of(chain, weight=Parameter(Tensor(np.ones(16, np.float32))))
    net = shard(cell.set_train(), init_device_mesh((1,), ("tp",)))
    inputs = (tensor_meta((16,), "float32"),)
    if select != "none":
        recompute(net, select=select)
    plan = prepare(net, *inputs).plan
    assert make_report(plan, algorithm_of, explained(net, plan)).training_bytes == 64 * held


def test_what_compiled_cells_send_again():
    """In a graph that holds the gradient what gradients need; called one by one all, also what only results do."""
    net = recompute(llama_on_two_ranks(), full=True)
    counts, gradients = [], value_and_grad(hsdp(net), compiled=True)
    for make in (lambda: prepare(net, IDS, IDS, compiled=True), lambda: gradients.prepare(IDS, IDS)):
        make()
        plan = programs(net)[-1].plan
        found = explained(net, plan)
        reports = [make_report(plan, algorithm_of, each) for each in (None, found)]
        plain, again = (collectives_of(report.traffic)["all_reduce"] for report in reports)
        assert again[0] == plain[0]
        counts.append(again[1] - plain[1])
        assert [mark.kind for mark in found.notes.values() if mark.kind] == ["recomputed whole"] * 2
    assert counts == [2, 4]  # of two layers the products of attention, and also those of mlp


def test_the_picture_of_a_budget(tmp_path):
    """As of the program that ran last."""
    net, inputs = recompute(sharded(llama), budget=0.5), INPUTS[llama]()
    with pytest.raises(ValueError, match=r"the root Cell .* has no program yet: call it, or prepare"):
        write_curve(net, tmp_path / "curve.svg")
    with pytest.raises(ValueError, match=r"has no budget: call recompute\(cell, budget=0.5\)"):
        write_curve(sharded(llama), tmp_path / "curve.svg")
    with pytest.raises(TypeError, match=r"write_curve\(\) takes a Cell that shard\(\) was called with, not ndarray"):
        write_curve(np.zeros(1), tmp_path / "curve.svg")
    assert list(tmp_path.iterdir()) == []
    value_and_grad(hsdp(net))(*inputs)
    with pytest.raises(
        FileNotFoundError, match=r"curve.svg' can't be written: there is no folder '.*nowhere': make it"
    ):
        write_curve(net, tmp_path / "nowhere" / "curve.svg")
    said = write_curve(net, tmp_path / "curve.svg")
    (choice,) = tree_of(net).activations.choices.values()
    assert said.startswith("recompute, budget 0.5: ") and choice.saved_bytes <= choice.all_bytes / 2
    share = f"{100 * choice.seconds / choice.forward_seconds:.1f} %"
    assert f", {share} of the forward pass\n" in said
    assert f", {share}</text>" in (tmp_path / "curve.svg").read_text(encoding="utf-8")
    assert "  model.layers.0-2.mlp.SiLU " in said


def test_a_copy_counts_for_who_makes_the_view():
    """A product of a view keeps one."""
    weight = Parameter(Tensor(np.ones((4, 4), np.float32)))
    turned = cell_of(lambda self, x: ops.matmul(ops.transpose(x * self.weight, (1, 0)), self.weight), weight=weight)
    net = recompute(shard(turned.set_train(), init_device_mesh((1,), ("tp",))), select=".Transpose")
    plan = prepare(net, tensor_meta((4, 4), "float32")).plan
    before, after = (saved_bytes(plan, keys, algorithm_of) for keys in (frozenset(), frozenset(keepers_by_key(plan))))
    marks = {mark.kind: mark.nbytes for mark in explained(net, plan).notes.values()}
    assert marks == {"recomputed": 64, "kept for others": 64} and before == after


def test_a_copy_counts_also_behind_a_move_that_does_nothing():
    links = SimpleNamespace(producers={(0,): (), (1,): ((0,),), (2,): ((1,),)}, nbytes={(0,): 8, (1,): 8, (2,): 4})
    before, after = [Memory((2,), 0, 8), Memory((2,), 1, 5)], [Memory((2,), 1, 5)]
    assert bytes_not_kept(links, {(0,)}, before, after) == {(0,): 8, (2,): 0}


def test_each_program_is_explained_as_it_is():
    net, inputs = recompute(sharded(Net), select="*.tanh"), INPUTS[Net]()
    net(*inputs)
    training = explain(net)
    net.set_train(False)
    net(*inputs)
    assert explain(net) != training
    net.set_train(True)
    net(*inputs)
    assert explain(net) == training


def test_operators_are_listed_with_and_without_recompute():
    inputs = INPUTS[llama]()
    plain, chosen = (list_operators(net, *inputs) for net in (sharded(llama), recompute(sharded(llama), full=True)))
    assert str(plain) == str(chosen)
    assert sum(entry.saved_bytes for entry in plain) > 0
    assert plain[0].name == "model.embed_tokens.Gather"
    (weights,) = [entry for entry in plain if entry.name == "model.layers.1.self_attn.core_attention.Attention"]
    assert weights.saved_bytes > 0
    attention, mlp, layer = (
        next(entry for entry in plain.cells if entry.name == f"model.layers.1{part}")
        for part in (".self_attn", ".mlp", "")
    )
    assert (attention.operator, layer.operator) == ("GroupedAttention", "DecoderLayer")
    assert weights.saved_bytes < attention.saved_bytes < layer.saved_bytes - mlp.saved_bytes
    assert "model.layers.1.self_attn.core_attention.Attention" in str(plain) and "GroupedAttention" in str(plain)
    with pytest.raises(TypeError, match="Dense isn't sharded: call shard"):
        list_operators(nn.Dense(2, 2))


def test_operators_are_listed_where_a_pattern_is_wrong():
    """It is what one calls then; and the wrong pattern is an error still."""
    inputs = INPUTS[llama]()
    net = recompute(sharded(llama), select="*.softmx")
    listed = list_operators(net, *inputs)
    assert str(listed) == str(list_operators(sharded(llama), *inputs))
    with pytest.raises(ValueError, match="'\\*.softmx' matches no Cell or operator"):
        net(*inputs)
    assert str(list_operators(net, *inputs)) == str(listed)


def test_a_budget_leaves_alone_what_is_swapped():
    net, inputs = swap(recompute(sharded(llama), budget=0.6), op_swap={"*.mlp": True}), INPUTS[llama]()
    net(*inputs)
    kinds = {keeper.name for keeper in keepers_by_key(programs(net)[-1].plan).values()}
    assert "recomputed" in kinds and len(kinds) > 1
