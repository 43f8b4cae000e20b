"""Slices, paddings and assignments by index where a dim is cut: what is gathered, what is sent, and both engines."""

import numpy as np
import pytest
from mindspore import Tensor, mint, ops
from support.nightly import daily
from support.small_cells import cell_of
from support.verified_calls import MESH, MESH_OF_4, Sample, eager, numbers, stopped, verified

from mindformers_core import shard
from mindformers_core.analysis.traffic import bytes_by_axes
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.capture.capture import capture
from mindformers_core.communication.world import rank_of
from mindformers_core.explaining.report import make_report
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import tensor_meta
from mindformers_core.program.plan import OperatorPlan
from mindformers_core.propagation.propagate import propagate
from mindformers_core.sharding.inspecting import explain
from mindformers_core.tensor_parallel import DTensor

X, IMAGE, ROWS = numbers(2, 8, 4), numbers(2, 4, 8, 4), numbers(2, 4)
PLACES = np.int32([1, 0])
ALL, EVEN = slice(None), slice(None, None, 2)
SLICES = (
    Sample("first", lambda x: x[:, 0], (X,)),
    Sample("last", lambda x: x[:, -1], (X,)),
    Sample("some", lambda x: x[1:, 2:4], (X,)),
    Sample("most", lambda x: x[:, 1:], (X,), ["cut_0_1"]),
    Sample("an element", lambda x: x[0, 3, 1], (X,)),
    Sample("one by one", lambda x: [row * 2.0 for row in x[0]], (X,), ["StridedSlice", "cut_0_0"]),
    Sample("nothing", lambda x: ops.cat([x[:, 3:3], x], 1), (X,), ["cut_0_1"]),
    Sample("integers", lambda i, x: i[:, 3] + x[:, 0], ((9 * X).astype(np.int32), X)),
    Sample("narrow", lambda x: x.narrow(1, 5, 2), (X,)),
    Sample("three", lambda x: [x[:, 5:7], ops.slice(x, (0, 1, 0), (2, 2, 1)), mint.select(x, 1, 3)], (X,), ["cut_0_1"]),
    Sample("strided", stopped(lambda x: ops.strided_slice(x, (0, 6, 0), (2, 3, 4), (1, -2, 1))), (X,), terms=False),
    Sample("patches", lambda x: [x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)], (IMAGE,)),
    Sample("steps that do not divide", lambda x: [x[:, 1:8:3], x[:, ::5, ::3]], (X,), ["Concat", "cut_0_1"]),
    Sample("backwards", lambda x: x[:, ::-1], (X,), ["cut_0_1"]),
    Sample(
        "steps backwards",
        lambda x: [x[:, 6:1:-2, ::-1], x[::-1, 2:7:2]],
        (X,),
        ["StridedSlice", "StridedSlice", "cut_0_1"],
    ),
    Sample("beside a tensor", lambda x, at: [x[at, -1], x[:, 0, at], x[at, None, 2:4]], (X, PLACES), ["cut_0_1"]),
    Sample("tuples", lambda x: [x[:, (0, -1)], x[:, [(0, 1), (3, 2)]], x[[(0, 1), (1, 0)], 2]], (X,)),
)
SHIFTS = (
    Sample("shift", lambda x: ops.pad(x, (0, 0, 1, -1)), (X,)),
    Sample("shift to the left", lambda x: ops.pad(x, (0, 0, -2, 2), value=1.5), (X,)),
    Sample("beyond a part", lambda x: ops.pad(x, (0, 0, 6, -6)), (X,)),
    Sample("of two dims", lambda x: ops.pad(x, (-1, 1, 2, -2)), (IMAGE,)),
    Sample("of mint", lambda x: mint.nn.functional.pad(x, (0, 0, 3, -3)), (X,)),
    Sample("shift and more", lambda x: ops.pad(x, (1, 1, 1, -1)), (X,), ["cut_0_2"]),
    Sample("fewer", lambda x: ops.pad(x, (0, 0, -1, -2)), (X,), ["cut_0_1"]),
)


def writing(*index):
    """A function of a tensor and values, and of places, which stand where `PLACES` is in the index."""

    def written(x, values, *places):
        x = x * 1.0
        x[tuple(places[0] if entry is PLACES else entry for entry in index)] = values
        return x

    return written


WRITES = (
    Sample("at places and an int", writing(PLACES, -1), (X, ROWS, PLACES), ["Concat", "cut_1_0"]),
    Sample("at an int and places", writing(-1, PLACES), (X, ROWS, PLACES), ["Concat", "cut_1_0"]),
    Sample("at places, apart", writing(PLACES, ALL, 0), (X, numbers(2, 8), PLACES), ["Concat", "cut_1_0"]),
    Sample(
        "at places of a part",
        writing(PLACES, slice(2, 4)),
        (X, numbers(2, 2, 4), PLACES),
        ["Concat", "cut_1_0", "cut_1_1"],
    ),
    Sample(
        "at a step of places",
        writing(ALL, EVEN, PLACES),
        (X, numbers(2, 4, 2), PLACES),
        ["Concat", "cut_1_1", "cut_1_2"],
    ),
    Sample(
        "at a new dim and places", writing(ALL, None, PLACES), (X, numbers(2, 1, 2, 4), PLACES), ["ToDtype", "cut_1_2"]
    ),
    Sample("at places, a new dim", writing(PLACES, None, 0), (X, numbers(2, 1, 4), PLACES), ["Concat", "cut_1_0"]),
    Sample("at an end", writing(ALL, -1), (X, ROWS)),
    Sample("at a part", writing(ALL, slice(2, 6)), (X, numbers(2, 4, 4))),
    Sample("at a corner", writing(ALL, slice(6), slice(1, 4)), (X, numbers(2, 6, 3))),
    Sample("at steps", writing(ALL, EVEN, EVEN), (X, numbers(2, 4, 2))),
    Sample("at steps that do not divide", writing(ALL, slice(1, None, 3), EVEN), (X, numbers(2, 3, 2))),
    Sample("of one value", lambda x: writing(ALL, EVEN, EVEN)(x, 0), (X,)),
    Sample("at a tuple", lambda x, values: writing(ALL, (0, 3))(x, values), (X, numbers(2, 2, 4)), ["cut_1_1"]),
)


EVERY = SLICES + SHIFTS + WRITES
BY_DAY = [
    *EVERY[::4],
    *(each for each in EVERY if str(each) in ("last", "at a new dim and places", "shift to the left")),
]


@pytest.mark.parametrize("sample", daily(BY_DAY, EVERY), ids=str)
def test_as_on_one_card(sample):
    assert verified(sample) == sample.gathered


OF_TWO_AXES = *SLICES[1:3], SLICES[10], *SHIFTS[1:4], WRITES[0], WRITES[-5]


@pytest.mark.parametrize("sample", daily(OF_TWO_AXES[::3], OF_TWO_AXES), ids=str)
def test_of_two_axes(sample):
    verified(sample, MESH_OF_4)


def shifted(x):
    """MindSpore's own padding is wrong on CPU."""
    plain = ops.cat([ops.zeros_like(x[:, :3]), x[:, :-3]], 1)
    return ops.pad(x, (0, 0, 3, -3)) if isinstance(x, DTensor) else plain


BY_OPERATOR = Sample("shift", shifted, (X,)), *SLICES[1:3], *WRITES[:8], *WRITES[-5:]


@pytest.mark.parametrize("sample", daily(BY_OPERATOR[::3], BY_OPERATOR), ids=str)
def test_operator_by_operator(sample):
    eager(sample)


BYTES = (  # of 64 rows, 64 bytes each: a row from each of the other rank's
    ("a row", lambda x: x[:, -1], "all_gather dim 1 over a, 64 B"),
    ("a shift", lambda x: ops.pad(x, (0, 0, 1, -1)), "permute by 1 over a, 64 B"),
)


@pytest.mark.parametrize(("name", "function", "wanted"), BYTES, ids=[entry[0] for entry in BYTES])
def test_a_row_is_sent_whatever_the_number_of_rows(name, function, wanted):
    with rank_of(2, 0):
        net = shard(cell_of(lambda self, x: function(x)), MESH, plan={"": {"input": {"x": layout(None, "a")}}})
        found = explain(net, Tensor(numbers(1, 32, 16)))
    assert wanted in found and "sends 64 B forward" in found, found


def test_errors():
    x = Tensor(X)
    for function, text in (
        (lambda self, x: ops.slice(x, (0, 0, 0), ops.ones_like(x[0, 0, :3]).int()), "has none: give it ints"),
        (lambda self, x: writing(ALL, slice(None, None, -1))(x, 1.0), "a slice with a negative step"),
        (lambda self, x: x[:, np.arange(3)], "integer tensor, not ndarray"),
        (lambda self, x: x[:, [0, 8]], r"index \[0, 8\] is out of range for dim 1 of size 8"),
    ):
        with rank_of(2, 0), pytest.raises((ValueError, TypeError, IndexError), match=text):
            explain(shard(cell_of(function), MESH), x)


SIZE = 3 << 18  # large enough that bytes decide, not the launches of collectives


def taken(function, parts):
    """The algorithms of the slices, and bytes sent forward, of a tensor (4, SIZE) whose dim 1 is cut."""
    with rank_of(parts, 0):
        graph = capture(cell_of(function), tensor_meta((4, SIZE), "float32"))
        arriving = {0: layout(None, "tp").bind(init_device_mesh((parts,), ("tp",)))}
        plan = propagate(graph, arriving[0].mesh, arriving, {}, {}, algorithm=algorithm_of)
        sent = bytes_by_axes(make_report(plan, algorithm_of).traffic)[("tp",)][0]
    operators = [entry for entry in plan.instructions if isinstance(entry, OperatorPlan)]
    return [entry.algorithm for entry in operators if entry.node.operator == "StridedSlice"], sent


@pytest.mark.parametrize("parts", [2, 8])
def test_a_part_is_taken_by_what_sends_less(parts):
    """A rank gives what might be in its part, so as much as in a gather where as much as that is taken."""
    part, row = SIZE // parts, 4 * 4 * (parts - 1)
    assert taken(lambda self, x: x[:, 1:part] * 2.0, parts) == (["slice"], (part - 1) * row)
    assert taken(lambda self, x: x[:, 1 : 1 + part] * 2.0, parts) == ([None], part * row)
    assert taken(lambda self, x: x[:, 1:] * 2.0, parts) == ([None], part * row)


def test_several_slices_share_a_gather_where_that_sends_less():
    def of_parts(count):
        size = SIZE // 12

        def construct(self, x):
            return sum((x[:, place * size : (place + 1) * size] * float(place)).sum() for place in range(count))

        return construct

    part = 4 * 4 * SIZE // 12
    assert taken(of_parts(4), 2) == (["slice"] * 4, 4 * part)
    assert taken(of_parts(8), 2) == ([None] * 8, 6 * part)
