"""Collectives as text: it makes the very object that a step of a plan would get, and it has a readable name."""

import itertools

import pytest

from mindformers_core.communication import communicator
from mindformers_core.generation.module_source import collective_name, collective_source
from mindformers_core.layout import Layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.redistribution import CPU, plan_redistribution
from mindformers_core.redistribution.steps import STEP_KINDS, Step, routing_step, shift_step

pytestmark = pytest.mark.usefixtures("rank_0_of_4")
MESH = init_device_mesh((2, 2), ("dp", "tp"))
WHOLE = Layout.on(MESH, ((), ()))


def step(kind, axes=("tp",), dim=None, to_dim=None, op=None, source=WHOLE, target=WHOLE):
    return Step(kind, axes, dim, to_dim, op, source, target, (8, 8), 4)


def planned():
    """The steps of all redistributions between some layouts, one of each kind and attributes."""
    entries = [((), ()), (("tp",), ()), ((), ("tp",)), (("dp", "tp"), ()), (("tp", "dp"), ()), (("dp",), ("tp",))]
    entries.append(((2, "tp"), ()))
    layouts = [Layout.on(MESH, dims) for dims in entries]
    layouts += [Layout.on(MESH, ((), ()), {"tp": op}) for op in ("sum", "avg", "max")]
    layouts += [Layout.on(MESH, ((), ()), (), ("tp",)), Layout.on(MESH, (("dp",), ()), {"tp": "sum"})]
    for source, target in itertools.permutations(layouts, 2):
        ops = {op for _, op in source.partial + target.partial}
        if "max" not in ops or len(ops) == 1:
            yield from plan_redistribution(source, target, (8, 8), "float32", CPU).steps


EXAMPLES = {
    "all_reduce_tp": step("all_reduce", op="sum"),
    "all_reduce_tp_max": step("all_reduce", op="max"),
    "all_gather_tp_dim_1": step("all_gather", dim=1),
    "all_gather_varying_dp_tp_dim_0": step("all_gather_varying", ("dp", "tp"), dim=0),
    "mark_varying_dp_tp": step("mark_varying", ("dp", "tp")),
    "reduce_scatter_tp_dim_0_avg": step("reduce_scatter", dim=0, op="avg"),
    "all_to_all_tp_dim_0_to_1": step("all_to_all", dim=0, to_dim=1),
    "to_partial_varying_tp": step("to_partial_varying", op="sum"),
    "permute_dp_tp": step(
        "permute",
        ("dp", "tp"),
        source=Layout.on(MESH, (("dp", "tp"), ())),
        target=Layout.on(MESH, (("tp", "dp"), ())),
    ),
    "shift_tp_by_minus_1": shift_step(MESH, ("tp",), -1, (4, 8), "float32"),
    "dispatch_tp": routing_step("dispatch", MESH, ("tp",), (4, 8), "float32", 6),
    "combine_tp": routing_step("combine", MESH, ("tp",), (6, 8), "float32", 4),
    "shift_some_dp_tp_by_1": shift_step(MESH, ("dp", "tp"), 1, (4, 8), "float32", (0, 2)),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_names(name):
    assert collective_name(EXAMPLES[name]) == name and name.isidentifier()


def test_texts():
    assert collective_source(EXAMPLES["all_reduce_tp"]) == 'collectives.make("all_reduce", axes=("tp",), op="sum")'
    assert collective_source(EXAMPLES["mark_varying_dp_tp"]) == 'collectives.make("mark_varying", axes=("dp", "tp"))'
    assert collective_source(EXAMPLES["permute_dp_tp"]) == (
        'collectives.make("permute", axes=("dp", "tp"), source=Layout.on(mesh, (("dp", "tp"), ())), '
        'target=Layout.on(mesh, (("tp", "dp"), ())))'
    )


def test_the_text_makes_the_step_s_cell():
    """For the fake world, steps of many plans; and every kind that there is."""
    collectives = communicator(MESH)
    steps = [*planned(), *EXAMPLES.values()]
    given = {"dim": 0, "op": "sum"}
    others = {kind: STEP_KINDS[kind].attributes for kind in STEP_KINDS.keys() - {one.kind for one in steps}}
    for one in [*steps, *(step(kind, **{name: given[name] for name in names}) for kind, names in others.items())]:
        made = eval(collective_source(one), {"collectives": collectives, "mesh": MESH, "Layout": Layout})
        assert made is collectives.cell(one), one


def test_different_collectives_have_different_texts_and_names():
    texts = {}
    for one in [*planned(), *EXAMPLES.values()]:
        texts.setdefault(collective_source(one), (communicator(MESH).cell(one), collective_name(one)))
    assert len({cell for cell, _ in texts.values()}) == len(texts)
    names = [name for _, name in texts.values() if not name.startswith(("permute", "view"))]
    assert len(set(names)) == len(names)


def test_errors_of_make():
    collectives = communicator(MESH)
    with pytest.raises(
        ValueError, match="unknown collective 'allreduce': choose one of slice.*did you mean 'all_reduce'"
    ):
        collectives.make("allreduce", axes=("tp",), op="sum")
    with pytest.raises(TypeError, match="collective 'all_to_all' over .'tp',. takes dim, to_dim, not dim$"):
        collectives.make("all_to_all", axes=("tp",), dim=0)
    with pytest.raises(TypeError, match="'mark_varying' over .* takes nothing else, not op$"):
        collectives.make("mark_varying", axes=("tp",), op="sum")
    with pytest.raises(ValueError, match="unknown mesh axis 'tq'.*did you mean 'tp'"):
        collectives.make("mark_varying", axes="tq")
    other = Layout.on(init_device_mesh((4,), ("tp",)), (("tp",),))
    with pytest.raises(ValueError, match="permute target is on DeviceMesh.*not on this communicator's DeviceMesh"):
        collectives.make("permute", axes=("dp", "tp"), source=WHOLE, target=other)
    assert collectives.make("mark_varying", axes="tp") is collectives.make("mark_varying", axes=["tp"])
