"""Where two recorded runs part: the first step, and in it the first tensor, that differs. Pure Python."""

from dataclasses import dataclass, field

import numpy as np

from mindformers_core.diff.digests import distance, norm_of
from mindformers_core.diff.runs import Copy
from mindformers_core.diff.tolerance import tolerance_of_growth, tolerances_of_noise
from mindformers_core.hints import first_of


@dataclass(frozen=True, eq=False)
class Compared:
    """A tensor of both runs, compared with A's first copy."""

    key: tuple  # (what, number of the pass or None, name)
    copies: dict  # "A" and "B" -> the `Copy`s
    run: str  # "A" or "B", which has
    copy: Copy  # the first copy beyond the tolerance, else the farthest
    relative: float  # distance of that copy, relative to the norm
    tolerance: float  # and what is allowed

    @property
    def differs(self):
        """Whether the distance is beyond the tolerance."""
        return self.relative > self.tolerance


@dataclass(eq=False)
class Parting:
    """The comparison of two runs up to the first step that differs."""

    runs: dict  # "A" and "B" -> the `Run`
    facts: dict  # name of a tensor of either run -> see `tensor_facts`; and the names of its `consumers`
    perturbed: bool  # whether the tolerances come from a perturbed run
    note: str  # what was not compared, and why; or ""
    steps: list = field(default_factory=list)  # numbers of the steps that were compared
    last: dict = field(default_factory=dict)  # key -> `Compared`, of the last step in A's order
    only: dict = field(default_factory=dict)  # "A" and "B" -> keys of the last step that can't be compared
    agree: int = 0  # number of tensors that agree, of all steps

    @property
    def first(self):
        """The first `Compared` that differs, or None."""
        return next((each for each in self.last.values() if each.differs), None)


def part(run_a, run_b, noise=None):
    """The `Parting` of two `Run`s; `noise`: one of them, and the same run perturbed, or None.

    Raises:
        ValueError: no step or no tensor in common, or steps that take different data.
    """
    steps = [step for step in run_a.steps if step in run_b.steps]
    if not steps:
        shown = " and ".join(f"'{run.title}' has {first_of(run.steps) or 'none'}" for run in (run_a, run_b))
        raise ValueError(f"no step is recorded in both runs by all ranks: {shown}")
    note, facts = _other_sequences(run_a, run_b), run_b.facts | run_a.facts
    alike = set() if note else _alike(run_a.facts, run_b.facts)
    facts = {name: about | {"consumers": []} for name, about in facts.items()}
    for name, about in facts.items():
        for source in facts.keys() & about["inputs"]:
            facts[source]["consumers"].append(name)
    parting = Parting({"A": run_a, "B": run_b}, facts, noise is not None, note)
    for number in steps:
        parting.steps.append(number)
        has_noise = noise is not None and all(number in run.steps for run in noise)
        _compare(parting, alike, [run.step(number) for run in noise] if has_noise else None)
        if parting.first is not None:
            break
        if not parting.last:
            why = f": {note}" if note else ""
            raise ValueError(f"'{run_a.title}' and '{run_b.title}' have no tensor in common in step {number}{why}")
    return parting


def _other_sequences(run_a, run_b):
    """A note where passes of the runs have other data, or their order, else ""; `ValueError` where even steps have."""
    after = "in A and B: gradients, norm and weights after them are compared"
    ours, theirs = (run.about.get("sequences") for run in (run_a, run_b))
    if None in (ours, theirs) or ours == theirs:
        orders = [run.about.get("order") for run in (run_a, run_b)]
        return "" if None in orders or orders[0] == orders[1] else f"passes have tokens in another order {after}"
    counts = [sum(map(len, passes)) for passes in (ours, theirs)]
    if counts[0] != counts[1]:
        raise ValueError(
            f"a step of A takes {counts[0]} sequences, one of B {counts[1]}: give both the same global batch, as "
            f"b:training.global_batch_size={counts[0]}, and a local_batch_size that divides it"
        )
    return f"passes have other sequences {after}"


def _alike(*facts):
    """The names of tensors that mean the same in both runs: of a Cell's operators those before the first other one."""
    made = [{(*_place(name), each["operator"], *each["shape"]) for name, each in run.items()} for run in facts]
    # call of a Cell -> place of its first other operator, which is entered last
    others = {call: place for call, place, *_ in sorted(made[0] ^ made[1], reverse=True) if place}
    places = {name: _place(name) for name in facts[0].keys() & facts[1].keys()}
    return {name for name, (call, place) in places.items() if place < others.get(call, (np.inf,))}


def _place(name):
    """`("mlp#0", (3, 1))` of an operator's result "mlp#0:3.1"; `()` where a name has no place in a call."""
    call, _, place = name.rpartition(":")
    is_placed = "#" in call and not place.startswith("constant")
    return call, tuple(map(int, place.split("."))) if is_placed else ()


def _compare(parting, alike, noise):
    """Compare the last one of the steps; `noise`: that step of a run and of the same one perturbed, or None."""
    step = {label: run.step(parting.steps[-1]) for label, run in parting.runs.items()}
    held = [{key for key, copies in found.items() if copies} for found in step.values()]
    common = {key for key in held[0] & held[1] if key[1] is None or key[2] in alike}
    parting.only = {label: [key for key in found if key not in common] for label, found in step.items()}
    before, parting.last = parting.last, {}
    tolerances = noise and tolerances_of_noise(common, parting.facts, noise)
    for key in step["A"]:
        if key not in common:
            continue
        if noise is None:
            tolerance = tolerance_of_growth(key, parting.facts, step["A"], parting.last, before)
        else:
            tolerance = tolerances[key]
        parting.last[key] = _compared(key, {label: found[key] for label, found in step.items()}, tolerance)
    parting.agree += sum(not each.differs for each in parting.last.values())


def _compared(key, copies, tolerance):
    """The `Compared` of a tensor."""
    first = copies["A"][0].values
    pairs = [(run, copy) for run, each in copies.items() for copy in each]
    # 1e-300 in front: a digest that isn't finite has no norm
    relative = [distance(first, copy.values) / max(1e-300, norm_of(first), norm_of(copy.values)) for _, copy in pairs]
    place = next((place for place, each in enumerate(relative) if each > tolerance), int(np.argmax(relative)))
    return Compared(key, copies, *pairs[place], relative[place], tolerance)
