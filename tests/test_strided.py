"""Dims that are merged behind a cut one stay cut, in strides: values and gradients, by `verify`, and what is sent."""

import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from models import EXAMPLES, axes_of
from support.nightly import daily
from support.plan_checks import MESH, check_plan, move_bytes, plan_of
from test_redistribution import check_plan as check_steps

from mindformers_core import verify
from mindformers_core.capture.capture import capture
from mindformers_core.diff.digests import digest
from mindformers_core.layout import Layout, layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators import tensor_meta
from mindformers_core.program.plan import Redistribution
from mindformers_core.propagation.resized import resized
from mindformers_core.redistribution import plan_redistribution

LENGTH, BATCH, SIZE = 6, 4, 8
PLAN = {"": {"input": {"x": layout(None, "dp")}, "output": layout(None)}}
WIDE = DeviceMesh((2, 4), ("dp", "tp"))
ROWS = Layout.on(DeviceMesh((2, 2), ("dp", "tp")), [(LENGTH, "dp"), ()])


def numbers(*shape, seed=0):
    return Tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def sent(plan):
    """Names of the collectives of a plan, forward."""
    moves = [entry for _, inner in plan.walk() for entry in inner.instructions if isinstance(entry, Redistribution)]
    names = [step.forward[0] for move in moves for step in move.steps]
    return [name for name in names if name not in ("identity", "view", "slice")]


def checked(cell, *inputs, plan=PLAN, **declared):
    """The plan of a Cell, which `verify` finds no fault in."""
    check = verify(cell, MESH, *inputs, plan=plan)
    assert not check.faults, check.report()
    (_, found) = next(iter(check.plans.values()))
    return found


class Heads(nn.Cell):
    """Heads beside the batch in one dim, both of them cut."""

    def __init__(self):
        super().__init__()
        self.project = nn.Dense(SIZE, SIZE)

    def construct(self, x):
        heads = self.project(x).reshape(LENGTH, BATCH * 4, SIZE // 4).swapaxes(0, 1)
        scores = ops.softmax(ops.bmm(heads, heads.swapaxes(1, 2)), -1)
        return ops.bmm(scores, heads).swapaxes(0, 1).reshape(LENGTH, BATCH, SIZE)


LAYERS = {
    "encoder": lambda: nn.TransformerEncoderLayer(SIZE, 2, 16, dropout=0.0),
    "with dropout": lambda: nn.TransformerEncoderLayer(SIZE, 2, 16, dropout=0.25),
    "dense": lambda: nn.SequentialCell(nn.Dense(SIZE, 16), nn.ReLU(), nn.Dense(16, SIZE)),
}


@pytest.mark.parametrize("name", daily(("encoder", "dense"), LAYERS))
def test_layers_with_the_batch_second_send_nothing(name):
    cell = LAYERS[name]().set_train()
    argument = {"dense": "input"}.get(name, "src")
    given = {"": {"input": {argument: layout(None, "dp")}}} if name != "dense" else {"": {"input": layout(None, "dp")}}
    found = checked(cell, numbers(LENGTH, BATCH, SIZE), plan=given)
    assert sent(found) == [] and move_bytes(found)[0] == 0
    made = [str(at) for _, inner in found.walk() for entry in inner.instructions for _, at in entry.produced]
    assert "[(6, dp), -]" in made


def test_attention_with_the_batch_second():
    class Attention(nn.Cell):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(SIZE, 2)

        def construct(self, x, y):
            return self.attention(x, y, y)[0]

    given = {"": {"input": {"x": layout(None, "dp"), "y": layout(None, "dp")}}}
    found = checked(Attention(), numbers(LENGTH, BATCH, SIZE), numbers(3, BATCH, SIZE, seed=1), plan=given)
    assert sent(found) == []


def test_batch_and_heads_in_one_dim():
    given = {**PLAN, "project": {"weight": layout("tp")}}
    found = checked(Heads(), numbers(LENGTH, BATCH, SIZE), plan=given)
    made = [str(at) for _, inner in found.walk() for entry in inner.instructions for _, at in entry.produced]
    assert "[(dp, 2, tp), -, -]" in made


def merged(x):
    return ops.reshape(x, (LENGTH * BATCH, SIZE))


FUNCTIONS = {  # what is done with rows in strides -> the collectives that it needs, forward
    "elementwise": (lambda x: ops.exp(merged(x)) * merged(x), []),
    "sum": (lambda x: ops.sum(merged(x), 0), ["all_reduce"]),
    "mean": (lambda x: mint.mean(merged(x), 0), ["all_reduce"]),
    "max": (lambda x: ops.amax(merged(x), 0), None),
    "softmax of the rows": (lambda x: ops.softmax(merged(x), 0), None),
    "softmax of the columns": (lambda x: ops.softmax(merged(x), 1), []),
    "product": (lambda x: ops.matmul(merged(x).T, merged(x)), ["all_reduce"]),
    "back": (lambda x: ops.reshape(merged(x) * 2.0, (LENGTH, BATCH, SIZE)), []),
    "other dims": (lambda x: ops.reshape(merged(x), (2, 3, BATCH, 2, 4)), []),
    "added to ordinary rows": (lambda x: merged(x) + ops.reshape(x.swapaxes(0, 1), (-1, SIZE)), None),
    "cumsum": (lambda x: ops.cumsum(merged(x), 0), None),
    "flip": (lambda x: ops.flip(merged(x), (0,)), None),
    "sort": (lambda x: ops.sort(merged(x), 0)[0], None),
    "some rows": (lambda x: merged(x)[3:17], None),
    "rows by index": (lambda x: ops.gather(merged(x), Tensor([3, 5, 0]), 0), None),
    "concat": (lambda x: ops.cat([merged(x), merged(x)], 0), None),
    "triu": (lambda x: ops.triu(merged(x), 1), None),
    "argmax": (lambda x: ops.argmax(merged(x), 0) + ops.sum(merged(x)), None),
    "dropout": (lambda x: ops.dropout(merged(x), 0.5, True), None),
    "std": (lambda x: mint.std(merged(x), 0), None),
    "tile": (lambda x: ops.tile(x[0], (3, 1)), []),
}


@pytest.mark.parametrize("name", daily([*FUNCTIONS][::2], FUNCTIONS))
def test_operators_on_strided_rows(name):
    function, collectives = FUNCTIONS[name]

    class Cell(nn.Cell):
        def construct(self, x):
            return function(x)

    cell = Cell()
    given = {"": {"input": {"x": layout(None, "dp")}}}
    found = checked(cell, numbers(LENGTH, BATCH, SIZE), plan=given)
    if collectives is not None:
        assert sent(found)[: len(collectives)] == collectives


STRIDED = {
    "gathered like its dims": (((2, "tp"),), ((),), [("view", 0), ("all_gather", 96), ("view", 0)]),
    "to the parts of the blocks": (((4, "dp"),), (("dp",),), [("view", 0), ("all_to_all", 32), ("view", 0)]),
    "an axis stays": ((("dp", 2, "tp"),), (("dp",),), [("view", 0), ("all_gather", 48), ("view", 0)]),
    "summed": (((2, "tp"),), ((2, "tp"),), [("all_reduce", 32)]),
}


@pytest.mark.parametrize("what", STRIDED)
def test_strided_dims_are_split_for_collectives(what):
    source, target, steps = STRIDED[what]
    marks = {"partial": {"dp": "sum"}} if what == "summed" else {}
    plan = plan_redistribution(Layout.on(WIDE, source, **marks), Layout.on(WIDE, target), (16,), 8)
    assert [step.forward for step in plan.steps] == steps
    check_steps(plan, (16,), np.random.default_rng(0))


def test_the_parts_of_a_rank():
    whole = np.arange(24 * 2).reshape(24, 2)
    assert ROWS.local_shape((24, 2)) == (12, 2) and ROWS.divisor(0) == 2 and str(ROWS) == "[(6, dp), -]"
    assert ROWS.contiguous == Layout.on(ROWS.mesh, [("dp",), ()])
    expected = whole.reshape(6, 4, 2)[:, 2:].reshape(12, 2)
    np.testing.assert_array_equal(whole[ROWS.local_slices((24, 2), 2)], expected)
    assert ROWS.local_runs((24, 2), 2)[0][:2] == (slice(2, 4), slice(6, 8))
    assert Layout.on(ROWS.mesh, [(1, "dp", 2, 3), (2, "tp", 2)]).dims == (("dp",), (2, "tp"))
    with pytest.raises(ValueError, match="dim 0 has size 18"):
        ROWS.local_shape((18, 2))


def test_digests_add_up():
    whole = np.random.default_rng(0).normal(size=(24, 3))
    parts = []
    for rank in (0, 2):
        starts = [tuple(run.start for run in runs) for runs in ROWS.local_runs(whole.shape, rank)]
        parts.append(digest(whole[ROWS.local_slices(whole.shape, rank)], starts))
    np.testing.assert_allclose(sum(parts)[:4], digest(whole, (0, 0))[:4], rtol=1e-9)


def test_a_strided_plan_at_other_sizes():
    def planned(length):
        x = tensor_meta((length, BATCH, 2 * SIZE), "float32")
        cell = EXAMPLES["batch second"].make()
        return plan_of(cell, (x,), {}, plan=EXAMPLES["batch second"].plan(axes_of(MESH))), capture(cell, x)

    (large, _), (own, graph) = planned(24), planned(8)
    small = resized(large, graph)
    check_plan(small, final=True)
    assert [str(at) for at in small.layouts.values()] == [str(at) for at in own.layouts.values()]
