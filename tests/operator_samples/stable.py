"""Functions of NumPy that are right at extremes, where those of tests/operator_calls aren't."""

import numpy as np
from scipy import special

__all__ = ["FUNCTIONS"]


def _log_sum(x, dim=None, keepdim=False):
    return special.logsumexp(x, axis=dim, keepdims=keepdim)


def _mish(x):
    return x * np.tanh(np.logaddexp(0, x))


FUNCTIONS = {  # name of an operator -> function
    "Erf": special.erf,
    "Erfc": special.erfc,
    "LogSoftmax": special.log_softmax,
    "LogSumExp": _log_sum,
    "Mish": _mish,
    "Sigmoid": special.expit,
    "SiLU": lambda x: x * special.expit(x),
    "Rsqrt": lambda x: 1 / np.sqrt(x),
    "Softplus": lambda x: np.logaddexp(0, x),
    "SoftplusExt": lambda x: np.logaddexp(0, x),
    "HSwish": lambda x: np.where(x <= -3, 0, x * np.clip(x / 6 + 0.5, 0, 1)),
    "LogSigmoid": lambda x: (-np.logaddexp(0, -x), np.exp(-np.abs(x))),
}
