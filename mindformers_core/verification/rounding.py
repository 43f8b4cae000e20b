"""By how much rounding may change a tensor: what a run differs by whose numbers were changed by units of rounding.

The idea is that of TTrace (2026), and of stochastic arithmetic (Parker, "Monte Carlo arithmetic", 1997). Pure Python.
"""

import numpy as np

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
PEAK = 300.0  # of float16 numbers, whose squares have no float16
FACTOR = 12.0  # of two estimates of a distance: clean pairs reached 4.3, two perturbed runs 8.3
_SPREAD = 2.0  # of two perturbed runs by FACTOR units, in each of which other elements pass a kink, as that of ReLU


def factors(shape, eps, draw):
    """An array of factors that change every element by FACTOR times `eps` of it, up or down, by a NumPy generator."""
    return 1 + FACTOR * eps * draw.choice([-1, 1], shape)


def allowances(card, *others):
    """Id of each array of a `OneCard` -> the absolute difference that rounding may make to it, as other runs say.

    Infinite where integers or infinities differ: rounding decides them.
    """
    tables = [dict(_arrays(other)) for other in others]
    return {id(array): max(_allowed(array, table[place]) for table in tables) for place, array in _arrays(card)}


def _arrays(card):
    tables = card.values, card.gradients, card.weight_gradients, card.outputs, card.written, {0: card.step_gradients}
    for number, table in enumerate(tables):
        for label, arrays in table.items():
            for place, array in arrays.items() if isinstance(arrays, dict) else enumerate(arrays):
                yield (number, label, place), array


def _allowed(value, perturbed):
    if value.dtype.kind not in "fc":
        return 0.0 if np.array_equal(value, perturbed) else np.inf
    with np.errstate(invalid="ignore"):
        difference = np.abs(value - perturbed)
    same = np.array_equal(np.isfinite(value), np.isfinite(perturbed))
    return _SPREAD * float(difference.max(initial=0.0, where=np.isfinite(difference))) if same else np.inf
