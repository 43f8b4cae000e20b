"""The type checker of plans: each fault that is planted in a plan is named, and no choice of a rule is refused."""

import zlib
from dataclasses import replace
from functools import lru_cache
from inspect import isfunction
from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import nn, ops
from operator_calls import ALL_CALLS
from support.captured_models import small_llama
from support.planned_models import planned
from support.small_cells import cell_of
from test_operators import MESH as SQUARE, ask, combinations, fill, meta_of, shape_of, tensors_of

from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import LocalCall, TensorMeta, tensor_meta
from mindformers_core.operators.choice import Choice, OperatorCall
from mindformers_core.operators.resolve import alternatives
from mindformers_core.program.graph import OperatorNode
from mindformers_core.program.plan import CallPlan, Redistribution
from mindformers_core.program.structure import Value, tree_leaves
from mindformers_core.propagation.checking import PlanError, check_plan
from mindformers_core.propagation.operators import local_call_shapes, operator_plan
from mindformers_core.redistribution import CPU

MESH = init_device_mesh((2, 2), ("dp", "tp"))


def on(*dims, partial=(), varying=()):
    """A layout on the mesh: an axis or None for every dim."""
    return Layout.on(MESH, [(dim,) if dim else () for dim in dims], dict.fromkeys(partial, "sum"), varying)


@lru_cache(1)
def llama():
    """The plan of a small Llama with data, tensor and sequence parallelism."""
    model, make = small_llama()
    args, named = make(1)
    return planned(model, MESH, args, named, SimpleNamespace(batch_axes="dp", sequence_parallel=True))[1]


def rebuilt(plan, path, edit, known=None):
    """A copy of a plan with `edit` applied to the first plan at `path`; what is shared stays shared."""
    known = {} if known is None else known
    if id(plan) not in known:
        instructions = [
            replace(entry, plan=rebuilt(entry.plan, below(path, entry), edit, known))
            if isinstance(entry, CallPlan)
            else entry
            for entry in plan.instructions
        ]
        copy = replace(plan, instructions=tuple(instructions))
        known[id(plan)] = edit(copy) if path == "" else copy
    return known[id(plan)]


def below(path, call):
    """The rest of a path below a call; None where it doesn't lead there."""
    child = call.node.child
    return None if path is None or not f"{path}.".startswith(f"{child}.") else path[len(child) + 1 :]


def entry(kind, change, number=0):
    """An edit of a plan: an instruction (a move, or a node by its name) becomes those that `change` gives."""

    def edit(plan):
        found = [place for place, each in enumerate(plan.instructions) if kind == name_of(each)]
        entries = list(plan.instructions)
        entries[found[number] : found[number] + 1] = change(entries[found[number]])
        return replace(plan, instructions=tuple(entries))

    return edit


def name_of(each):
    if isinstance(each, Redistribution):
        return "move"
    return each.node.child if isinstance(each, CallPlan) else each.node.operator


def field(**changes):
    """An instruction, or a plan, with other fields; a function gets the old value."""

    def change(old):
        made = {name: new(getattr(old, name)) for name, new in changes.items() if isfunction(new)}
        return replace(old, **changes | made)

    return change


def becomes(**changes):
    change = field(**changes)
    return lambda old: [change(old)]


def first(layout):
    """The first of several layouts is another."""
    return lambda old: (layout, *old[1:])


def step(**changes):
    """The first step of a Redistribution is another."""
    return lambda steps: (replace(steps[0], **changes), *steps[1:])


def cut(axes_of):
    """Another choice: factor -> the axes that cut it."""
    return becomes(choice=Choice(tuple(axes_of.items())))


ATTENTION, NORM = "model.layers.0.self_attn", "model.layers.0.input_layernorm"
CORE = f"{ATTENTION}.core_attention"
MLP = "model.layers.0.mlp"
Q, OUT, LOSS, EMBED = f"{ATTENTION}.q_proj", f"{ATTENTION}.o_proj", "loss", "model.embed_tokens"
BACKWARDS = {"instructions": lambda all_: (all_[1], all_[0], *all_[2:])}
FAULTS = {  # name -> (path of the Cell, edit of its plan, what the error says)
    "a gather is missing": ("", entry("move", lambda old: [], 1), r"call: takes .* as \[dp, -, -\] \(varying: tp\)"),
    "a mark is missing": (Q, entry("move", lambda old: []), r"Dense: takes %1.*\(varying: dp\), which isn't available"),
    "a reduction is missing": (OUT, entry("move", lambda old: [], 1), r"takes %2.* as \[dp, tp, -\].*partial sum"),
    "reduced twice": (OUT, entry("move", lambda old: [old, old], 1), "which is available already"),
    "carried out in another order": (Q, field(**BACKWARDS), "which isn't available"),
    "an operator is missing": (MLP, entry("SiLU", lambda old: []), r"takes %\d+.* no layout yet"),
    "the last operator is missing": (CORE, entry("Reshape", lambda old: [], -1), "1 operators or calls .* never"),
    "an operator twice": (MLP, entry("Mul", lambda old: [old, old]), "Mul: is carried out twice"),
    "a call twice": ("model", entry("norm", lambda old: [old, old]), "the call: is carried out twice"),
    "parts of a whole": (ATTENTION, entry("Rotary", becomes(outputs=(on("dp", None, None, "tp"),))), "Rotary: gives"),
    "an output's cut forgotten": (
        MLP, entry("SiLU", becomes(outputs=(on("dp", None, None),))), r"gives %\d+.* planned is"),
    "an output's sum forgotten": (OUT, entry("Dense", becomes(outputs=(on("dp", None, None),))), "partial sum: tp"),
    "an output's mark added": (
        NORM, entry("RMSNorm", becomes(outputs=(on("dp", None, None, varying=["tp"]),))), r"gives %\d+"),
    "an input in another cut": (
        LOSS, entry("Exp", becomes(inputs=(on("dp", "tp", None),))), r"Exp: takes %4.*isn't available"),
    "an input's mark dropped": (Q, lambda plan: unmarked(plan), r"input 1 has layout \[tp, -\], where .*varying: dp"),
    "one input too few": (MLP, entry("Mul", becomes(inputs=lambda old: old[:1])), "takes 2 tensors, planned"),
    "a factor not cut": (MLP, entry("SiLU", cut({"d0": ("dp",)})), r"input 0 has layout .* where"),
    "a factor too much": (
        MLP, entry("Mul", cut({"d0": ("dp",), "d1": ("tp",), "d2": ("tp",)})), "can't be cut as"),
    "a whole factor cut": (ATTENTION, entry("Rotary", cut({"d3": ("tp",)})), "'d3' has to be whole"),
    "an algorithm forgotten": (
        EMBED, entry("Gather", becomes(algorithm=None, cut_axes=())), "runs None, where gather is needed"),
    "an algorithm over other axes": (EMBED, entry("Gather", becomes(cut_axes=("dp",))), "runs gather"),
    "an algorithm without need": (MLP, entry("SiLU", becomes(algorithm="softmax")), "runs softmax, where None"),
    "global sizes in a local call": (
        CORE, entry("Reshape", becomes(signature=lambda old: replace(old, local=LocalCall()))),
        "elements can't become"),
    "another rule": (
        MLP, entry("Mul", becomes(signature=lambda old: replace(old, linear=()))), "has another rule: 'linear'"),
    "a sum through a logarithm": (LOSS, lambda plan: unreduced(plan), r"Log: input 0 .*\(partial sum: tp\), where"),
    "a step of another kind": (
        LOSS, entry("move", becomes(steps=step(kind="all_gather")), 1), "can't take the step all_gather"),
    "a step over another axis": (LOSS, entry("move", becomes(steps=step(axes=("dp",))), 1), "can't take the step"),
    "a gather without a sum": (
        "", entry("move", becomes(steps=step(kind="all_gather")), 1), r"can't take the step all_gather dim 1"),
    "a gather along another dim": ("", entry("move", becomes(steps=step(dim=0)), 1), "can't take the step"),
    "a step of another size": ("", entry("move", becomes(steps=step(shape=(2, 8, 48))), 1), "goes on from"),
    "no steps": (OUT, entry("move", becomes(steps=()), 1), "its steps lead from"),
    "another target": (OUT, entry("move", becomes(target=on("dp", None, "tp")), 1), "its steps lead from"),
    "from a layout that isn't there": (OUT, entry("move", becomes(source=on("dp", "tp", None)), 1), "isn't available"),
    "a gradient forgotten": (OUT, entry("move", becomes(gradient=False)), "is planned without a gradient"),
    "gradients of the plan": (NORM, field(gradients=frozenset()), "gradients of .* planned wrongly"),
    "passed otherwise": ("model", lambda plan: passed(plan), r"has %8.* as \[dp, tp, -\], the Cell in \[dp, -, -\]"),
    "given otherwise": ("model", entry("norm", becomes(outputs=(on("dp", None, None),))), "call: has .*the Cell in"),
    "handed down without need": (
        "model", entry("norm", lambda old: [replace(old, lifted=(*old.lifted, lent(old)))]), "hands down"),
    "results in another layout": (OUT, field(results=(on("dp", None, None),)), "as .*which isn't available"),
    "a constant that is cut": (
        "model", field(layouts=lambda old: old | {2: on("dp", None, None)}), "constant .* not whole"),
    "on another mesh": (NORM, field(mesh=init_device_mesh((2, 2), ("dp", "tp"), (4, 5, 6, 7))), "on another mesh than"),
}  # fmt: skip


def unmarked(plan):
    """A weight goes into its product without its mark."""
    plan = entry("move", lambda old: [])(plan)
    return entry("Dense", becomes(inputs=lambda old: (old[0], on("tp", None))))(plan)


def unreduced(plan):
    plan = entry("move", lambda old: [], 1)(plan)
    return entry("Log", becomes(inputs=(on("dp", None, partial=["tp"]),)))(plan)


def passed(plan):
    """The last norm is planned for an input that its caller doesn't pass."""
    change = becomes(plan=lambda inner: replace(inner, layouts=inner.layouts | {0: on("dp", None, None)}))
    return entry("norm", change)(plan)


def lent(call):
    return tree_leaves(call.node.args)[0], call.inputs[0]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name):
    path, edit, message = FAULTS[name]
    with pytest.raises(PlanError, match=message) as raised:
        check_plan(rebuilt(llama(), path, edit), final=True)
    assert str(raised.value).count("\n") == 0 and "the plan of" in str(raised.value)
    check_plan(rebuilt(llama(), path, lambda plan: plan), final=True)


def test_results_of_a_root_are_reduced():
    def unreduced_loss(plan):
        plan = entry("move", lambda old: [], -1)(plan)
        left = plan.layouts[tree_leaves(plan.graph.result)[0].id]
        return replace(plan, results=(left,))

    plan = rebuilt(llama(), LOSS, unreduced_loss)
    scalar = plan.calls[-1].plan.results[0]
    plan = entry("loss", becomes(outputs=(scalar,)))(replace(plan, results=(scalar,)))
    plan = replace(plan, layouts=plan.layouts | {plan.calls[-1].node.outputs.id: scalar})
    check_plan(plan)
    with pytest.raises(PlanError, match="which is not reduced"):
        check_plan(plan, final=True)


def gated(self, x):
    """A gated block as of Mamba: two parts of one product, of which one goes through a column-parallel layer."""
    u, z = ops.chunk(self.inp(x), 2, -1)
    y = self.dt(ops.silu(u))
    y = (ops.expand_dims(y, -1) * ops.expand_dims(u, -1)).sum(-1)
    return self.out(y * ops.silu(z)).square().mean()


def test_a_part_of_a_whole_tensor_is_not_taken_to_be_cut():
    plan = {"dt": {"weight": {"weight": layout("tp", None)}}, "out": {"weight": {"weight": layout(None, "tp")}}}
    x = tensor_meta((4, 2, 8), "float32")
    layers = {name: nn.Dense(8, size, has_bias=False) for name, size in (("inp", 16), ("dt", 8), ("out", 8))}
    check_plan(planned(cell_of(gated, **layers), MESH, (x,), plan=plan, arriving={"x": layout("dp")})[1], final=True)


EVERY = [  # a third of them daily
    pytest.param(call, marks=[pytest.mark.nightly] * (number % 3 > 0)) for number, call in enumerate(ALL_CALLS)
]


@pytest.mark.parametrize("call", EVERY, ids=str)
def test_the_local_call_of_every_choice_gives_the_parts(call):
    """Of every rule: asked with local shapes it gives those of the parts, whatever output is wanted."""
    rng = np.random.default_rng(zlib.crc32(str(call).encode()))
    tensors = tensors_of(call)
    signature, args, named = ask(call, list(map(meta_of, tensors)))
    shapes = [shape_of(signature, dims) for dims in signature.outputs]
    values = iter([Value(number, t.shape, str(t.dtype), "x") for number, t in enumerate(tensors)])
    args = fill(args, TensorMeta, values)
    named = {name: fill(value, TensorMeta, values) for name, value in named.items()}
    outputs = tuple(Value(100 + number, shape, "float32", "y") for number, shape in enumerate(shapes))
    node = OperatorNode(call.name, "function", tuple(args), named, outputs, None, None, None)
    wanted = [(d, given) for d, shape in zip(signature.outputs, shapes) for given in cuts_of(shape)]
    for layouts in combinations(tensors, rng)[-3:]:
        metas = tuple(map(meta_of, tensors, layouts))
        asked = OperatorCall(call.name, signature, metas, SQUARE, CPU)
        for way in alternatives(asked, wanted):
            plan = operator_plan(node, asked, way)
            if plan.algorithm is None:
                parts = [given.local_shape(shape) for given, shape in zip(way.outputs, shapes)]
                assert local_call_shapes(plan) == parts, (layouts, way)


def cuts_of(shape):
    """Layouts that cut dims, by one axis each or both."""
    for a in (None, *range(len(shape))):
        for b in (None, *range(len(shape))):
            dims = [[axis for axis, dim in (("a", a), ("b", b)) if dim == place] for place in range(len(shape))]
            if all(size % 2 ** len(axes) == 0 for size, axes in zip(shape, dims)):
                yield Layout.on(SQUARE, dims)
