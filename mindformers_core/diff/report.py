"""The text about two runs: that they agree, or the first tensor that differs, and its inputs. Pure Python."""

import os

import numpy as np

from mindformers_core.diff.digests import PROJECTIONS, distance, norm_of
from mindformers_core.diff.runs import holders
from mindformers_core.diff.tolerance import FACTOR, GROWTH, inputs_of
from mindformers_core.hints import first_of, listed

_SHOWN = 4  # tensors


def report(parting):
    """The text of a `Parting`: at most 20 lines."""
    return "\n".join(_lines(parting))


def _lines(parting):
    for label, run in parting.runs.items():
        yield f"{label}  {run.title}: {run.about['mesh']}, {run.about['context']}"
    source = f"{GROWTH:g} x the difference of an operator's inputs"
    if parting.perturbed:
        source = f"{FACTOR:g} x the difference of a run with perturbed weights"
    steps, compared, alone = parting.steps, list(parting.last.values()), []
    for label, keys in parting.only.items():
        cells = listed([parting.facts[key[2]]["cell"] or key[2] for key in keys], 3)
        alone += [f"{len(keys):,} of {label} ({cells})"] if keys else []
    if parting.first is None:
        shown = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
        closest = max((each.relative / each.tolerance for each in compared), default=0.0)
        same = "same as far as compared" if alone or parting.note else "same"
        same = f"{same}: {parting.agree:,} tensors of {shown} agree; the largest difference is {closest:.2f} of its"
        yield f"{same} tolerance ({source})"
    else:
        before = parting.agree - sum(not each.differs for each in compared[compared.index(parting.first) :])
        differ = sum(each.differs for each in compared)
        yield f"they part in step {steps[-1]}: {before:,} tensors before it agree; {differ:,} differ in its step"
        yield from _about_first(parting, source)
    if parting.note or alone:
        yield parting.note or f"not compared, for one run or some ranks lack them: {'; '.join(alone)}"


def _about_first(parting, source):
    """The lines about the first tensor that differs."""
    first, facts = parting.first, parting.facts
    (what, number, name), copy, about = first.key, first.copy, facts[first.key[2]]
    is_gradient = what in ("gradient", "weight gradient")
    direction = f", {'backward' if is_gradient else 'forward'} pass {number}" if number is not None else ""
    yield f"the first  {what} of '{about['hint']}', {about['dtype']} {about['shape']}{direction}"
    if "#" in name:
        yield f"  Cell        '{about['cell']}', {'made by' if is_gradient else 'operator'} {_operator(about)}"
    else:
        yield f"  tensor      {name}"
    if is_gradient:
        used = [f"{facts[each]['cell']} {_operator(facts[each])}" for each in about["consumers"]]
        yield f"  used by     {listed(used, _SHOWN) or 'nothing that is recorded'}"
    again = ", computed again in the backward pass" if copy.again else ""
    yield f"  in {first.run}        {_ranks(first)}, layout {copy.layout}{again}"
    if copy.moved:
        yield f"  behind      {copy.moved}; the operator's own result agrees"
    yield f"  difference  {first.relative:.2g} of the norm; tolerance {first.tolerance:.2g}, {source}"
    yield f"  A           {_statistics(first.copies['A'][0].values)}"
    yield f"  {'B' if first.run == 'B' else 'A there':<11} {_statistics(copy.values)}"
    inputs = [parting.last[key] for key in inputs_of(first.key, facts, parting.last)]
    agreements = [
        f"{each.key[0]} of '{facts[each.key[2]]['hint']}' ({facts[each.key[2]]['operator']}): "
        + ("differs" if each.differs else f"{each.relative:.1g}, agrees")
        for each in inputs
    ]
    yield f"  inputs      {listed(agreements, _SHOWN) or 'none that is recorded'}"
    for run in () if copy.moved else "AB":
        moved = [copy.moved for each in inputs for copy in each.copies[run] if copy.moved]
        if moved:
            yield f"  before it   in {run}: {listed(moved, 2)}"


def _ranks(first):
    """The ranks that hold the first copy that differs, and those of the wrong parts, where the other run has such."""
    copy = first.copy
    together = holders(copy.layout, copy.rank)
    if len(together) == 1:
        return f"rank {copy.rank}" + (f" (of {first_of(sorted(copy.terms))})" if len(copy.terms) > 1 else "")
    shown = f"ranks {first_of(together)} together"
    other = next((each for each in first.copies["A"] if each.layout == copy.layout and not copy.layout.partial), None)
    if other is None or other is copy:
        return shown
    least = first.tolerance * norm_of(copy.values)
    wrong = [rank for rank in together if distance(other.terms.get(rank, copy.terms[rank]), copy.terms[rank]) > least]
    return f"{shown}, wrong on {first_of(wrong)}" if wrong else shown


def _operator(about):
    file = about["source"]
    if file and file.startswith(os.getcwd() + os.sep):
        file = os.path.relpath(file)
    return f"{about['operator']}, {file}" if file else about["operator"]


def _statistics(values):
    if np.isnan(values).any():
        return "a tensor of another shape"
    bad = f", {values[PROJECTIONS + 2]:.0f} not finite" if values[PROJECTIONS + 2] else ""
    return f"norm {norm_of(values):.6g}, largest {values[PROJECTIONS + 1]:.6g}{bad}"
