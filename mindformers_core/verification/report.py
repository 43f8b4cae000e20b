"""The text of a verification: the first fault, where it is, and what kind it is where that is certain. Pure Python."""

from itertools import combinations

import numpy as np

from mindformers_core.hints import first_of
from mindformers_core.program.graph import ParameterUse
from mindformers_core.program.plan import CallPlan, Redistribution
from mindformers_core.program.structure import tree_leaves
from mindformers_core.verification.comparison import close, expected_part

__all__ = ["fault_lines", "kind_of_fault"]

_SHOWN = 3  # elements of an array; consumers of a tensor
_SAME = 1e-4  # relative difference up to which a factor or a slice explains what was found


def fault_lines(fault, others, mesh, roots):
    """The lines about one fault.

    Args:
        fault: the first `Fault`.
        others: the faults of other ranks in the same tensor.
        mesh: of all ranks.
        roots: the `CellPlan`s of all stages.
    """
    frames = list(dict.fromkeys(frame for root in roots for _, frame in root.walk()))
    coordinates = ", ".join(f"{axis} {place}" for axis, place in zip(mesh.axis_names, mesh.coordinate(fault.rank)))
    lines = [f"the first is on rank {fault.rank} ({coordinates}): {_what(fault)}"]
    if fault.seen is not None:
        lines += _instruction_lines(fault, frames)
    elif fault.file:
        lines.append(f"  bucket    {fault.file}")
    elif fault.what == "weight gradient":
        lines.append(f"  used by   {_listed(_users(fault.path, frames))}")
    if fault.layout is not None:
        lines.append(f"  layout    {_tensor(fault)} {fault.layout}")
    lines.append(f"  found     {_array(fault.found)}")
    lines.append(f"  one card  {_array(fault.expected)}")
    ranks = sorted({fault.rank, *(other.rank for other in others)})
    lines.append(f"  wrong on  {len(ranks)} of {mesh.size} ranks: {first_of(ranks)}")
    kind = kind_of_fault(fault, others, mesh)
    return [*lines, f"  kind      {kind}"] if kind else lines


def _what(fault):
    passed = ""
    if fault.label is not None:
        key, number, *_ = fault.label
        passed = f", micro-batch {key}, run {number}" + (f", stage {fault.stage}" if fault.stage else "")
    if fault.seen is None:
        return f"{fault.what} of '{fault.path}'{passed}" if fault.path else f"{fault.what}{passed}"
    of = "gradient of " if fault.what == "gradient" else ""
    direction = "backward" if fault.what == "gradient" else "forward"
    return f"the {of}tensor '{fault.seen.variable}', {direction} pass{passed}"


def _instruction_lines(fault, frames):
    """Where a tensor is produced, and, of a gradient, consumed."""
    seen, entry = fault.seen, fault.seen.entry
    lines = [f"  Cell      '{fault.path}' ({seen.frame.graph.class_name.rpartition('.')[2]})"]
    if isinstance(entry, ParameterUse):
        lines.append(f"  parameter '{entry.path}', as the Cell gets it")
    else:
        made = _shown(entry)
        lines.append(f"  {'made by ' if fault.what == 'gradient' else 'operator'}  {made}; {_generated(fault)}")
    if fault.what == "gradient":
        consumers = _consumers(seen.frame, seen.value, seen.layout, frames, fault.path)
        lines.append(f"  used by   {_listed(consumers) or 'the caller'}: their gradients agree before")
    elif not isinstance(entry, ParameterUse):
        inputs = [f"{value.hint} {list(value.shape)} {layout}" for value, layout in entry.consumed]
        lines.append(f"  inputs    {'; '.join(inputs)}: all that were compared agree")
    return lines


def _listed(entries):
    """Some instructions, in a few words."""
    shown = list(dict.fromkeys(map(_shown, entries)))
    return "; ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


def _users(path, frames):
    """The instructions that take a parameter; alike Cells share a `CellPlan`, which has the path in one of them."""
    uses = [(frame, use) for frame in frames for use in frame.graph.parameters]
    exact = [(frame, use) for frame, use in uses if use.path == path]
    alike = [(frame, use) for frame, use in uses if use.local and f".{path}".endswith(f".{use.local}")]
    found = [_consumers(frame, use.value, frame.layouts[use.value.id]) for frame, use in exact or alike]
    return [entry for entries in found for entry in entries]


def _shown(entry):
    """An instruction in a few words."""
    if isinstance(entry, Redistribution):
        return f"redistribution {entry.described}, for {entry.reason}"
    if isinstance(entry, CallPlan):
        return f"Cell '{entry.node.child or entry.node.graph.path}', {entry.node.source}"
    algorithm = f" (distributed: {entry.algorithm})" if entry.algorithm else ""
    return f"{entry.node.operator}{algorithm}, {entry.node.source}"


def _consumers(frame, value, layout, frames=(), path=""):
    """The instructions that take a tensor, also behind its redistributions, and where the call of `path` returns it."""
    found = []
    for entry in frame.instructions:
        if (value, layout) in entry.consumed:
            found.append(entry)
            if isinstance(entry, Redistribution):
                found += _consumers(frame, value, entry.target, frames, path)
    places = [place for place, leaf in enumerate(tree_leaves(frame.graph.result)) if leaf == value]
    for caller in frames if places and layout in [frame.results[place] for place in places] else ():
        for call in caller.instructions:
            if isinstance(call, CallPlan) and call.frame is frame and f".{path}".endswith(f".{call.node.child}"):
                outer, above = tree_leaves(call.node.outputs)[places[0]], path[: -len(call.node.child)].rstrip(".")
                found += _consumers(caller, outer, call.outputs[places[0]], frames, above)
    return found


def _generated(fault):
    """The line of the generated module that produces the tensor."""
    with open(fault.file, encoding="utf-8") as file:
        lines = file.read().splitlines()
    number = next(n for n, line in enumerate(lines) if line.lstrip().startswith(f"observed(self, {fault.number}, "))
    return f"{fault.file}:{number}: {lines[number - 1].strip().partition('  # ')[0]}"


def _tensor(fault):
    return f"{fault.value.dtype} {list(fault.value.shape)}"


def _array(array):
    """The first elements, and the norm."""
    flat = np.asarray(array).ravel()
    head = ", ".join(f"{element:.6g}" for element in flat[:_SHOWN])
    more = ", …" if flat.size > _SHOWN else ""
    norm = f", norm {np.linalg.norm(flat.astype(np.float64)):.6g}" if flat.dtype.kind == "f" and flat.size > 1 else ""
    return f"[{head}{more}] {list(np.shape(array))}{norm}"


def kind_of_fault(fault, others, mesh):
    """What kind of fault it is, as a sentence; "" where that isn't certain.

    Args:
        fault, others, mesh: as of `fault_lines`.
    """
    found, expected = fault.found, fault.expected
    if found.shape != expected.shape:
        return f"the shape is {list(found.shape)}, not {list(expected.shape)}"
    if expected.dtype.kind != "f":
        return _rearranged(fault)
    if not found.any():
        return "all elements are zero"
    if not np.isfinite(found).all():
        return "some elements are not finite"
    return _missing_reduction(fault, others, mesh) or _factor(found, expected, mesh) or _rearranged(fault)


def _missing_reduction(fault, others, mesh):
    """The sentence about terms that should have been summed, or ""."""
    by_rank = {fault.rank: fault.found} | {other.rank: other.found for other in others}
    for axis in mesh.axis_names:
        members = mesh.group(fault.rank, (axis,))
        has_all = len(members) > 1 and all(rank in by_rank for rank in members)
        is_term = has_all and not close(by_rank[members[0]], by_rank[members[1]], _SAME)
        if is_term and close(sum(by_rank[rank] for rank in members), fault.expected, _SAME):
            return f"each rank of {axis} has a term of the sum: a reduction over {axis} is missing"
    return ""


def _rearranged(fault):
    """The sentence about a part of another rank, or about swapped dims, or ""."""
    found, expected, layout = fault.found, fault.expected, fault.layout
    for rank in () if layout is None else layout.mesh.rank_list:
        if close(found, expected_part(fault.value, layout, rank), _SAME):
            return f"it is the part of rank {rank}"
    for one, other in combinations(range(found.ndim), 2):
        if found.shape[one] == found.shape[other] and close(found.swapaxes(one, other), expected, _SAME):
            return f"dims {one} and {other} are swapped"
    return ""


def _factor(found, expected, mesh):
    """The sentence about a factor between two arrays that is the size of mesh axes, or its inverse; or ""."""
    norm = float(np.sum(np.square(expected, dtype=np.float64))) if expected.dtype.kind == "f" else 0.0
    if norm == 0.0:
        return ""
    factor = float(np.sum(found * expected, dtype=np.float64)) / norm
    if not factor or not close(found, factor * expected, _SAME):
        return ""
    names = [axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1]
    sizes = [
        (mesh.axis_size(*axes), " x ".join(axes)) for n in range(len(names)) for axes in combinations(names, n + 1)
    ]
    for size in sorted({size for size, _ in sizes}):
        named = " or ".join(axes for other, axes in sizes if other == size)
        if np.isclose(factor, size, rtol=_SAME):
            return f"{size} times too large, the size of {named}: perhaps it is summed once too often"
        if np.isclose(factor * size, 1, rtol=_SAME):
            return f"{size} times too small, the size of {named}: perhaps a sum is missing"
    return f"it is {factor:.6g} times the right value"
