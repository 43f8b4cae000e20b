"""The text about two runs: that they agree, or the first tensor that differs, and its inputs. Pure Python."""

import os

import numpy as np

from mindformers_core.diff.comparing import FACTOR, GROWTH, consumers_of, inputs_of, norm_of
from mindformers_core.diff.digests import PROJECTIONS
from mindformers_core.hints import first_of

__all__ = ["report"]

_SHOWN = 4  # inputs, ranks, Cells


def report(parting):
    """The text of a `Parting`: at most 20 lines."""
    runs = [f"{name}  {_run(run)}" for name, run in zip("AB", parting.runs)]
    notes = [*([parting.note] if parting.note else []), *_unmatched(parting)]
    source = f"{FACTOR:g} x the difference of a run with perturbed weights"
    if not parting.perturbed:
        source = f"{GROWTH:g} x the difference of an operator's inputs"
    steps = (
        f"step {parting.steps[0]}" if len(parting.steps) == 1 else f"steps {parting.steps[0]} to {parting.steps[-1]}"
    )
    if parting.first is None:
        closest = max((seen / allowed for seen, allowed in parting.last.agree.values()), default=0.0)
        same = f"same: {parting.agree:,} tensors of {steps} agree; the largest difference is {closest:.2f} of its"
        return "\n".join([*runs, f"{same} tolerance ({source})", *notes])
    before = parting.agree - sum(key in parting.last.agree for key in _keys_after(parting))
    counted = f"{before:,} tensors before it agree; {len(parting.last.differ):,} differ in its step"
    return "\n".join([*runs, f"they part in step {parting.steps[-1]}: {counted}", *_lines(parting, source), *notes])


def _lines(parting, source):
    """The lines about the first tensor that differs."""
    first, facts = parting.first, parting.facts
    what, number, name = first.key
    about = facts[name]
    where = {"value": "forward pass", "gradient": "backward pass", "weight gradient": "backward pass"}.get(what)
    passed = f", {where} {number}" if where else ""
    lines = [f"the first  {what} of '{about['hint']}', {about['dtype']} {about['shape']}{passed}"]
    if "#" in name:
        lines.append(
            f"  Cell        '{about['cell']}', {'made by' if what == 'gradient' else 'operator'} {_operator(about)}"
        )
    else:
        lines.append(f"  tensor      {name}")
    consumers = consumers_of(facts)
    if what in ("gradient", "weight gradient"):
        used = [f"{facts[each]['cell']} {_operator(facts[each])}" for each in consumers.get(name, ())]
        lines.append(f"  used by     {_some(used) or 'nothing that is recorded'}")
    copy, again = first.copy, ", computed again in the backward pass" if first.copy.again else ""
    lines.append(f"  in {first.run}        rank {first.rank}{_others(copy, first.rank)}, layout {copy.layout}{again}")
    if copy.moved:
        lines.append(f"  behind      {copy.moved}; the operator's own result agrees")
    lines.append(f"  difference  {first.relative:.2g} of the norm; tolerance {first.tolerance:.2g}, {source}")
    labels = ("A", "B") if first.run == "B" else ("A", "A there")
    lines += [f"  {label:<11} {_statistics(values)}" for label, values in zip(labels, first.values)]
    known = dict.fromkeys([*parting.last.agree, *(each.key for each in parting.last.differ)])
    inputs = inputs_of(first.key, facts, consumers, known)
    lines.append(f"  inputs      {_some([_agreement(parting, key) for key in inputs]) or 'none that is recorded'}")
    if not copy.moved:
        lines += _moves(parting, inputs)
    return lines


def _moves(parting, inputs):
    """The redistributions of the inputs in each run."""
    lines = []
    for label, run in zip("AB", parting.runs):
        step = run.step(parting.steps[-1])
        moved = [copy.moved for key in inputs for copy in step.get(key, ()) if copy.moved]
        if moved:
            lines.append(f"  before it   in {label}: {_some(list(dict.fromkeys(moved)), 2)}")
    return lines


def _agreement(parting, key):
    about, agree = parting.facts[key[2]], parting.last.agree
    state = f"{agree[key][0]:.1g}, agrees" if key in agree else "differs"
    return f"{key[0]} of '{about['hint']}' ({about['operator']}): {state}"


def _operator(about):
    file = about["source"]
    near = file and file.startswith(os.getcwd() + os.sep)
    return f"{about['operator']}, {os.path.relpath(file) if near else file}" if file else about["operator"]


def _some(texts, count=_SHOWN):
    texts = list(dict.fromkeys(texts))
    return "; ".join(texts[:count]) + (f"; and {len(texts) - count} more" if len(texts) > count else "")


def _others(copy, rank):
    """The other ranks that hold the tensor: those with its other parts, and those with other copies."""
    others = [each for each in copy.terms if each != rank]
    if not others:
        return ""
    return f" (of {first_of(sorted(copy.terms))})"


def _statistics(values):
    bad = f", {values[PROJECTIONS + 2]:.0f} not finite" if values[PROJECTIONS + 2] else ""
    if np.isnan(values).any():
        return "a tensor of another shape"
    return f"norm {norm_of(values):.6g}, largest {values[PROJECTIONS + 1]:.6g}{bad}"


def _run(run):
    about = run.about
    return f"{run.title}: {about.get('mesh', 'ranks')}, {about.get('context', 'recorded by record_digests()')}"


def _unmatched(parting):
    """A line about the tensors that one run alone has."""
    found = []
    for label, keys in (("A", parting.last.only_a), ("B", parting.last.only_b)):
        cells = _some([parting.facts[key[2]]["cell"] or key[2] for key in keys], 3)
        found += [f"{len(keys):,} of {label} alone ({cells})"] if keys and not parting.note else []
    return [f"not compared: {'; '.join(found)}"] if found else []


def _keys_after(parting):
    """The keys of the last step behind the first difference, in A's order."""
    step = list(parting.runs[0].step(parting.steps[-1]))
    return step[step.index(parting.first.key) :]
