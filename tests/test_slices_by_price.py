"""A part of a cut dim: taken by an algorithm, or from a gather that other slices share, by price."""

import pytest
from support.small_cells import cell_of

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
