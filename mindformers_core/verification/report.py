"""The text of a verification: the first fault, where it is, and what kind it is where that is certain. Pure Python."""

import re
from itertools import chain, combinations
from pathlib import Path

import numpy as np

from mindformers_core.grouping import grouped
from mindformers_core.hints import any_layer, first_of, listed
from mindformers_core.program.graph import ParameterUse
from mindformers_core.program.plan import CallPlan, Redistribution
from mindformers_core.program.structure import tree_leaves
from mindformers_core.verification.comparison import close, expected_part

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
    partial = () if fault.layout is None else tuple(axis for axis, _ in fault.layout.partial)
    ranks = sorted({rank for each in (fault, *others) for rank in _holders(each, partial)})
    coordinates = ", ".join(f"{axis} {place}" for axis, place in zip(mesh.axis_names, mesh.coordinate(fault.rank)))
    place = f" {fault.rank} ({coordinates})"
    if partial:  # a rank's term alone has no value on one card
        place = f"s {first_of(_holders(fault, partial))}, in what their terms make together"
    plans = list(dict.fromkeys(plan for root in roots for _, plan in root.walk()))
    lines = [f"the first is on rank{place}: {_what(fault)}", *_place_lines(fault, plans)]
    if fault.layout is not None:
        lines.append(f"  layout    {fault.value.dtype} {list(fault.value.shape)} {fault.layout}")
    kind = kind_of_fault(fault, others, mesh)
    lines += [f"  found     {_array(fault.found)}", f"  one card  {_array(fault.expected)}"]
    lines.append(f"  wrong on  {len(ranks)} of {mesh.size} ranks: {first_of(ranks)}")
    return [*lines, f"  kind      {kind}"] if kind else lines


def _holders(fault, partial):
    """The ranks whose terms along the axes `partial` make the tensor of a fault."""
    return fault.layout.mesh.group(fault.rank, partial) if partial else (fault.rank,)


def _what(fault):
    stage, label, seen, path, _ = fault.at
    text = f"{fault.what} of '{path}'" if path else fault.what
    if seen is not None:
        of, direction = ("gradient of ", "backward") if fault.what == "gradient" else ("", "forward")
        text = f"the {of}tensor '{seen.variable}', {direction} pass"
    passed = "" if label is None else f", micro-batch {label[0]}, run {label[1]}"
    return text + passed + (f", stage {stage}" if stage else "")


def _place_lines(fault, plans):
    """Where a tensor is produced, and, of a gradient, consumed."""
    _, _, seen, path, file = fault.at
    if seen is None:
        users = listed(map(_shown, _users(path, np.shape(fault.value), plans)), _SHOWN)
        used = f"  used by   {users}"
        return [f"  bucket    {file}"] if file else [used] if fault.what == "weight gradient" and users else []
    cell = f"  Cell      '{path}' ({seen.plan.graph.class_name.rpartition('.')[2]})"
    if isinstance(seen.entry, ParameterUse):
        return [cell, f"  parameter '{seen.entry.path}', as the Cell gets it"]
    if seen.entry is None:
        return [cell, "  argument  as the Cell gets it"]
    made = f"{_shown(seen.entry)}; {_generated(seen, file)}"
    if fault.what == "gradient":
        consumers = map(_shown, _consumers(seen.plan, seen.value, seen.layout, plans, path))
        used = listed(consumers, _SHOWN) or "the caller"
        return [cell, f"  made by   {made}", f"  used by   {used}: their gradients agree before"]
    inputs = "; ".join(f"{value.hint} {list(value.shape)} {layout}" for value, layout in seen.entry.consumed)
    return [cell, f"  operator  {made}", f"  inputs    {inputs}: all that were compared agree"]


def _users(path, shape, plans):
    """The instructions that take a parameter; alike Cells share a `CellPlan`, which has the path in one of them."""
    uses = [(plan, use) for plan in plans for use in plan.graph.parameters]
    tests = (
        lambda use: use.path == path,
        lambda use: any_layer(use.path) == any_layer(path),
        lambda use: use.local and f".{path}".endswith(f".{use.local}") and tuple(use.value.shape) == shape,
    )
    found = next(filter(None, ([pair for pair in uses if is_it(pair[1])] for is_it in tests)), ())
    return [entry for plan, use in found for entry in _consumers(plan, use.value, plan.layouts[use.value.id])]


def _shown(entry):
    """An instruction in a few words."""
    if isinstance(entry, Redistribution):
        return f"redistribution {entry.described}, for {entry.reason}"
    if isinstance(entry, CallPlan):
        return f"Cell '{entry.node.child or entry.node.graph.path}', {entry.node.source}"
    algorithm = f" (distributed: {entry.algorithm})" if entry.algorithm else ""
    return f"{entry.node.operator}{algorithm}, {entry.node.source}"


def _consumers(plan, value, layout, plans=(), path=""):
    """The instructions that take a tensor, also behind its redistributions, and where the call of `path` returns it."""
    found = []
    for entry in plan.instructions:
        if (value, layout) in entry.consumed:
            found.append(entry)
            if isinstance(entry, Redistribution):
                found += _consumers(plan, value, entry.target, plans, path)
    places = [place for place, leaf in enumerate(tree_leaves(plan.graph.result)) if leaf == value]
    for caller in plans if places and layout in [plan.results[place] for place in places] else ():
        for call in caller.instructions:
            if isinstance(call, CallPlan) and call.plan is plan and f".{path}".endswith(f".{call.node.child}"):
                outer, above = tree_leaves(call.node.outputs)[places[0]], path[: -len(call.node.child)].rstrip(".")
                found += _consumers(caller, outer, call.outputs[places[0]], plans, above)
    return found


def _generated(seen, path):
    """The line of the generated module that produces the tensor."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    number = next(n for n, line in enumerate(lines) if line.lstrip().startswith(f"observed(self, {seen.number}, "))
    return f"{Path(path).name}:{number}: {lines[number - 1].strip().partition('  # ')[0]}"


def instruction_at(observed, path, file, number):
    """The instruction of a Cell whose source has the line `number`: of `observed`, the first one behind."""
    text = "".join(Path(file).read_text(encoding="utf-8").splitlines(keepends=True)[number - 1 :])
    found = re.search(r"observed\(self, (\d+), ", text)
    entry = observed[int(found[1])].entry if found else None
    shown = f"{_shown(entry)}; " if entry is not None and not isinstance(entry, ParameterUse) else ""
    return f"in Cell '{path}', {shown}{Path(file).name}:{number}: {text.strip().partition(chr(10))[0]}"


def _array(array):
    """The first elements, and the norm."""
    flat = np.asarray(array).ravel()
    head = first_of([f"{element:.6g}" for element in flat[: _SHOWN + 1]], _SHOWN)
    norm = f", norm {np.linalg.norm(flat.astype(np.float64)):.6g}" if flat.dtype.kind == "f" and flat.size > 1 else ""
    return f"[{head}] {list(np.shape(array))}{norm}"


def kind_of_fault(fault, others, mesh):
    """What kind of fault it is, as a sentence; "" where that isn't certain.

    Args:
        fault, others, mesh: as of `fault_lines`.
    """
    found, expected = fault.found, fault.expected
    if found.shape != expected.shape:
        return f"the shape is {list(found.shape)}, not {list(expected.shape)}"
    if not np.isfinite(found).all():
        return "some elements are not finite"
    explanations = _rearranged(fault)
    if expected.dtype.kind == "f":
        zero = "all elements are zero", found, np.zeros_like(expected)
        explanations = chain([zero], _missing_sums(fault, others, mesh), _factors(found, expected, mesh), explanations)
    return next((sentence for sentence, one, other in explanations if close(one, other, _SAME)), "")


# Triples (sentence, array, array): the sentence is true where both arrays are equal.


def _missing_sums(fault, others, mesh):
    by_rank = {each.rank: each.found for each in (fault, *others)}
    for axis in mesh.axis_names:
        terms = [by_rank[rank] for rank in mesh.group(fault.rank, (axis,)) if rank in by_rank]
        if 1 < len(terms) == mesh.axis_size(axis) and not close(terms[0], terms[1], _SAME):
            text = f"each rank of {axis} has a term of the sum: a reduction over {axis} is missing"
            yield text, sum(terms), fault.expected


def _factors(found, expected, mesh):
    """A factor that is the size of mesh axes, or its inverse; or any other."""
    names = [axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1]
    subsets = (axes for count in range(len(names)) for axes in combinations(names, count + 1))
    sizes = grouped((mesh.axis_size(*axes), " x ".join(axes)) for axes in subsets)
    for size, named in sorted(sizes.items()):
        of = f"the size of {' or '.join(named)}: perhaps"
        yield f"{size} times too large, {of} it is summed once too often", found, expected * size
        yield f"{size} times too small, {of} a sum is missing", found * size, expected
    factor = np.sum(found * expected) / (np.sum(np.square(expected)) or 1.0)
    yield f"it is {factor:.6g} times the right value", found, factor * expected


def _rearranged(fault):
    """A part of another rank, or swapped dims."""
    found, layout = fault.found, fault.layout
    for rank in () if layout is None else layout.mesh.rank_list:
        yield f"it is the part of rank {rank}", found, expected_part(fault.value, layout, rank)
    for one, other in combinations(range(found.ndim), 2):
        yield f"dims {one} and {other} are swapped", found.swapaxes(one, other), fault.expected
