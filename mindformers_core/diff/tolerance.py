"""By how much a tensor may differ between two runs. Pure Python.

The tolerance comes from a *perturbed run*, whose initial weights were changed by a unit of rounding (the idea of
TTrace, 2026): `FACTOR * max(d, eps)`, where d is the tensor's relative distance between a run and the same one
perturbed, and eps the dtype's unit of rounding. Without a perturbed run the bound is that of one operator: `GROWTH`
times the largest relative difference of its inputs, or eps. Sums in any order differ by n eps, about sqrt(n) eps where
rounding errors are independent (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2). GROWTH is
twice the largest that was measured on clean pairs, 8.1.
"""

import numpy as np

from mindformers_core.diff.digests import distance, norm_of
from mindformers_core.verification.rounding import EPS, FACTOR

GROWTH = 16.0
_EXACT = 1e-12  # relative difference that the digests' own rounding may have
_RATE = "rate", None, "rate"
_AFTER = {"moment 1": "reduced gradient", "moment 2": "reduced gradient", "parameter": "moment 1"}


def inputs_of(key, facts, known):
    """The keys, among those known, of the tensors that a tensor is computed from; `facts`: of the `Parting`."""
    what, number, name = key
    if what == "value":
        found = [("value", number, source) for source in facts[name]["inputs"]]
    elif what in ("gradient", "weight gradient"):
        later = facts[name]["consumers"]
        found = [("gradient", number, each) for each in later]
        found += [("value", number, source) for each in later for source in (each, *facts[each]["inputs"])]
    elif what == "reduced gradient":
        found = [each for each in known if each[0] == "weight gradient" and each[2] == name]
    elif what == "gradient norm":
        found = [each for each in known if each[0] == "reduced gradient"]
    else:
        found = [(_AFTER.get(what, what), None, name), ("gradient norm", None, "gradient norm")]
    return [each for each in dict.fromkeys(found) if each in known]


def tolerances_of_noise(keys, facts, noise):
    """The tolerances of tensors from a step of a run and the same of that run perturbed, relative to norms: a dict."""
    found = {}
    for key in keys:
        found[key] = max(EPS.get(facts[key[2]]["dtype"], 0.0), _EXACT)
        if all(step.get(key) for step in noise):
            one, other = (step[key][0].values for step in noise)
            found[key] = max(found[key], distance(one, other) / max(norm_of(one), 1e-300))
    # AdamW's first steps change an element whose gradient is about 0 by the rate or less: in few parameters
    of_parameters = max((each for key, each in found.items() if key[0] == "parameter"), default=0.0)
    return {key: FACTOR * (of_parameters if key[0] == "parameter" else each) for key, each in found.items()}


def tolerance_of_growth(key, facts, step, seen, before):
    """The tolerance in a step of A from the differences of the inputs, relative to the norm.

    `seen`: key -> `Compared`, of all that came before in the step; `before`: the same of the step before.
    """
    inputs, kept = inputs_of(key, facts, seen), [key, ("parameter", None, key[2])]
    is_computed = key[0] in ("gradient", "weight gradient", "loss") or (
        key[0] == "value" and any(":constant" not in name for name in facts[key[2]]["inputs"])
    )
    if is_computed and not inputs:  # from any earlier tensor: at a stage's border, or behind a graph
        inputs, kept = seen, [each for each in before if each[0] == "parameter"]
    eps = EPS.get(facts[key[2]]["dtype"], 0.0)
    differences = [seen[each].relative for each in inputs] + [before[each].relative for each in kept if each in before]
    tolerance = max(GROWTH * max([eps, *differences]), _EXACT)
    if key[0] == "parameter" and step.get(_RATE):
        # AdamW's first steps change an element by the sign of its gradient, whatever its size: of gradients with the
        # relative difference d about the part d lies so near to zero that the sign is open
        moments = [("moment 1", None, key[2]), ("moment 2", None, key[2])]
        open_signs = np.prod(facts[key[2]]["shape"]) * max(
            (seen[each].relative for each in moments if each in seen), default=0.0
        )
        rate = norm_of(step[_RATE][0].values)
        tolerance += 2 * rate * np.sqrt(open_signs) / max(norm_of(step[key][0].values), 1e-300)
    return tolerance
