"""Whether a stage gives its tensors in the layouts that the next one takes them in: only local tensors travel."""

from mindformers_core.layout import LayoutSpec, bind_layout, layout
from mindformers_core.sharding.sharded_cells import ShardedCell, tree_of

__all__ = ["check_boundary", "declared_inputs"]


def declared_inputs(cell, names):
    """How a stage's Cell takes its arguments, as JSON can hold it: for every name the entries of a layout.

    None where the Cell isn't sharded; then what it takes is its own affair.
    """
    if not isinstance(cell, ShardedCell):
        return None
    declaration = tree_of(cell).declarations.get("")
    inputs = declaration.inputs if declaration else {}
    return [[name, _entries(inputs.get(name))] for name in names]


def check_boundary(layouts, giver, taker):
    """Raise `ValueError` where a stage gives a tensor in another layout than the next one takes it in.

    Args:
        layouts: those of the outputs, None for an output that isn't distributed.
        giver, taker: what the two stages say of themselves, see `PipelineStage.description`.
    """
    if taker["inputs"] is None:
        return
    for place, (given, (name, entries)) in enumerate(zip(layouts, taker["inputs"])):
        if given is None:
            continue
        wanted = layout(*(_entry(entry) for entry in entries)).bind(given.mesh, given.ndim)
        if wanted.dims != given.dims:
            raise ValueError(
                f"stage {giver['stage']} ({giver['cell']}) gives output {place} as {given}, but stage {taker['stage']} "
                f"({taker['cell']}) takes its input '{name}' as {wanted}: declare both alike, in the Cells' shard() or "
                "in a plan, for stages exchange local tensors"
            )


def _entries(declared):
    if declared is None:
        return ["..."]
    entries = declared.entries if isinstance(declared, LayoutSpec) else bind_layout(declared, None).dims
    return ["..." if entry is ... else entry for entry in entries]


def _entry(entry):
    return ... if entry == "..." else tuple(entry) if isinstance(entry, list) else entry
