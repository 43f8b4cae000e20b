"""Layouts for parameters that nobody declares: those in which their operators take them."""

from mindformers_core.capture.capture import capture
from mindformers_core.dtensor.move import cost_model
from mindformers_core.layout import Layout, bind_layout
from mindformers_core.program.structure import tree_leaves
from mindformers_core.propagation.propagate import derive_parameters

__all__ = ["derived_layouts"]


def derived_layouts(cell, mesh, declarations, layouts, free, inputs):
    """Parameter path -> layout, after one propagation in which some are free.

    Args:
        cell: not sharded yet.
        mesh, declarations: as in `shard`.
        layouts: of all parameters.
        free: paths of those that nobody declares.
        inputs: arguments of one call, with whole tensors.
    """
    graph = capture(cell, *inputs)
    declared = declarations[""].inputs if "" in declarations else {}
    arriving = {}
    for name, structure in graph.arguments.items():
        for value in tree_leaves(structure):
            layout = declared.get(name, Layout.on(mesh, ((),) * len(value.shape)))
            arriving[value.id] = bind_layout(layout, mesh, len(value.shape), name=f"input '{name}' of the root Cell")
    return derive_parameters(graph, mesh, arriving, layouts, declarations, cost_model(), free)
