"""Operators of linear layers in float8, of numbers that rounding leaves as they are; test_fp8.py has others."""

import numpy as np

import mindformers_core.tensor_parallel.fp8  # noqa: F401  (it registers them)
from operator_calls.call import Call, Draw, X

_POWERS = Draw((4, 8), lambda random, shape: random.choice([-1, 1], shape) * 2.0 ** random.integers(-3, 3, shape))


CALLS = []
OTHERS = [
    Call("Fp8Largest", [X], lambda x: np.abs(x).max()),
    Call("Fp8Round", [_POWERS, np.array(4.0), "e4m3", "hybrid"], lambda x, *_: x),
    Call("Fp8RoundGradient", [X, "e5m2", "hybrid"], lambda x, *_: x),
    Call("Fp8Probe", [X, "e5m2", "hybrid", 2], lambda x, *_: (x, x[0, [0, 0]])),
    Call("Fp8Probed", [X, np.array([1.0])], lambda x, _: x),
]
