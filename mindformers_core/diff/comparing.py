"""Two recorded runs, tensor by tensor: which differ by more than rounding explains. Pure Python.

The tolerance of a tensor comes from a *perturbed run*, whose initial weights were changed by a unit of rounding (the
idea of TTrace, 2026): `FACTOR * max(d, eps)`, where d is the tensor's relative distance between a run and the same one
perturbed, and eps the dtype's unit of rounding. So the tolerance has the condition of all that was computed before.
FACTOR covers the spread of two estimates of a distance; clean pairs reached 3.3, two perturbed runs 8.3.

Without a perturbed run the bound is that of one operator: `GROWTH` times the largest relative difference of its inputs,
or eps. Sums in any order differ by n eps (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2),
about sqrt(n) eps where rounding errors are independent, relative to the terms; GROWTH stands for that and for the
cancellation of terms. It is twice the largest that was measured on clean pairs, 8.1.
"""

from dataclasses import dataclass, field

import numpy as np

from mindformers_core.diff.digests import PROJECTIONS, distance

__all__ = [
    "EPS",
    "FACTOR",
    "GROWTH",
    "Comparison",
    "Difference",
    "compare_steps",
    "consumers_of",
    "inputs_of",
    "norm_of",
]

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
FACTOR = 12.0
GROWTH = 16.0
_EXACT = 1e-12  # relative difference that the digests' own rounding may have
_RATE = "rate", None, "rate"
_AFTER = {"moment 1": "reduced gradient", "moment 2": "reduced gradient", "parameter": "moment 1"}


@dataclass(frozen=True, eq=False)
class Difference:
    """A tensor that differs.

    Attributes:
        key: `(what, pass, name)`.
        run: "A" or "B": which run has the copy.
        copy: the `Copy`.
        rank: that holds it, with others.
        relative, tolerance: distance from A's first copy, and what is allowed, relative to the norm.
        values: digests of A's first copy, and of this one.
    """

    key: tuple
    run: str
    copy: object
    rank: int
    relative: float
    tolerance: float
    values: tuple


@dataclass(eq=False)
class Comparison:
    """The comparison of a step.

    Attributes:
        agree: keys that agree, in A's order, with their relative differences and tolerances.
        differ: the `Difference`s, in A's order.
        only_a, only_b: keys that the other run doesn't have.
    """

    agree: dict = field(default_factory=dict)
    differ: list = field(default_factory=list)
    only_a: list = field(default_factory=list)
    only_b: list = field(default_factory=list)


def compare_steps(a, b, facts, noise=None, before=None, is_compared=lambda key: True):
    """The `Comparison` of a step of two runs.

    Args:
        a, b: from `Run.step`.
        facts: name of a tensor -> dict, of both runs.
        noise: the step of a run, and that of the same run perturbed; or None.
        before: the `Comparison` of the step before, or None.
        is_compared: says of a key whether both runs mean the same tensor by it.
    """
    found, seen = Comparison(), {}
    consumers = consumers_of(facts)
    found.only_b = [key for key in b if key not in a or not is_compared(key)]
    for key, copies in a.items():
        if key not in b or not is_compared(key):
            found.only_a.append(key)
            continue
        first, about = first_of(copies), facts[key[2]]
        norm, eps = norm_of(first), EPS.get(about["dtype"], 0.0)
        if noise is None:
            tolerance = _bound(key, eps, seen, facts, consumers, before) + _update_bound(
                key, a, seen, norm, np.prod(about["shape"])
            )
        else:
            tolerance = FACTOR * max(_noise(key, noise), eps, _EXACT)
        relative, off = _farthest(first, norm, (("A", copies), ("B", b[key])), tolerance)
        seen[key] = relative
        if off is None:
            found.agree[key] = relative, tolerance
        else:
            run, copy, rank, values = off
            found.differ.append(Difference(key, run, copy, rank, relative, tolerance, (first, values)))
    return found


def first_of(copies):
    """The digest of the copy that was first made, on its first rank."""
    return next(iter(copies[0].wholes.values()))


def _noise(key, noise):
    """The relative distance of a tensor between a run and the same one perturbed; 0 where they don't have it."""
    if not all(key in step for step in noise):
        return 0.0
    one, other = (first_of(step[key]) for step in noise)
    return distance(one, other) / max(norm_of(one), 1e-300)


def norm_of(values):
    """The norm from a digest; of partial sums a bound, the norm of all terms together."""
    return float(np.sqrt(values[PROJECTIONS]))


def _farthest(first, norm, runs, tolerance):
    """`(relative distance, (run, Copy, rank, digest) or None)`: the first copy beyond tolerance, else the farthest."""
    largest = 0.0
    for run, copies in runs:
        for copy in copies:
            for rank, values in copy.wholes.items():
                size = max(norm, norm_of(values), 1e-300)
                relative = distance(first, values) / size
                relative = relative if relative == relative else np.inf
                if relative > tolerance:
                    return relative, (run, copy, rank, values)
                largest = max(largest, relative)
    return largest, None


def consumers_of(facts):
    """Name of a tensor -> names of the tensors that are computed from it."""
    found = {}
    for name, each in facts.items():
        for source in each["inputs"]:
            found.setdefault(source, []).append(name)
    return found


def inputs_of(key, facts, consumers, known):
    """The keys, among those known, of the tensors that a tensor is computed from."""
    what, number, name = key
    if what == "value":
        found = [("value", number, source) for source in facts[name]["inputs"]]
    elif what in ("gradient", "weight gradient"):
        later = consumers.get(name, ())
        found = [("gradient", number, each) for each in later]
        found += [("value", number, source) for each in later for source in (each, *facts[each]["inputs"])]
    elif what == "reduced gradient":
        found = [each for each in known if each[0] == "weight gradient" and each[2] == name]
    elif what == "gradient norm":
        found = [each for each in known if each[0] == "reduced gradient"]
    else:
        found = [(_AFTER.get(what, what), None, name), ("gradient norm", None, "gradient norm")]
    return [each for each in dict.fromkeys(found) if each in known]


def _bound(key, eps, seen, facts, consumers, before):
    """The tolerance of one operator, relative to the norm, from the differences of its inputs; see above."""
    inputs = inputs_of(key, facts, consumers, seen)
    earlier = {} if before is None else before.agree
    kept = [each for each in (key, ("parameter", None, key[2])) if each in earlier]
    if not inputs and _has_unseen_inputs(key, facts):  # any earlier tensor: at a stage's border, or behind a graph
        inputs, kept = seen, [each for each in earlier if each[0] == "parameter"]
    largest = max([eps, *(seen[each] for each in inputs), *(earlier[each][0] for each in kept)])
    return max(GROWTH * largest, _EXACT)


def _has_unseen_inputs(key, facts):
    """Whether a tensor is computed from others, though from none that both runs have."""
    if key[0] == "value":
        return any(":constant" not in name for name in facts[key[2]]["inputs"])
    return key[0] in ("gradient", "weight gradient", "loss")


def _update_bound(key, a, seen, norm, size):
    """What AdamW adds to the tolerance of a parameter, relative to its norm.

    The first steps change an element by the sign of its gradient, whatever its size: of gradients with the relative
    difference d about the part d lies so near to zero that the sign is open.
    """
    if key[0] != "parameter" or _RATE not in a:
        return 0.0
    largest = max(seen.get((what, None, key[2]), 0.0) for what in ("moment 1", "moment 2"))
    return 2 * norm_of(first_of(a[_RATE])) * np.sqrt(size * largest) / max(norm, 1e-300)
