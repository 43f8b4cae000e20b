"""Many random Cells: `PYTHONPATH=.:tests msrun --worker_num=2 --local_worker_num=2 --join=True tests/ranks/many_random_cells.py FIRST COUNT`.

FIRST is the first seed. 2 ranks or 4; every rank's log ends with how many were right, refused, wrong or ended in another error.
"""  # noqa: E501

import sys

from case_random_graphs import check_cells
from mindspore import Tensor, grad, ops

from mindformers_core.communication import init_distributed


def report(seed, mode, error):
    """What kind of failure it is; prints it."""
    cause = error.__cause__
    wrong = isinstance(cause, AssertionError) and "Not equal to tolerance" in str(cause)
    kind = (
        "fails on one card"
        if mode == "one card"
        else "wrong"
        if wrong
        else "refused"
        if isinstance(cause, (ValueError, TypeError))
        else "internal error"
    )
    print(f"FAILED {seed} {mode} {kind}: {type(cause).__name__}: {' '.join(str(cause).split())[:500]}", flush=True)
    grad(lambda x: ops.tanh(x).sum())(Tensor([1.0]))  # an error inside a gradient spoils the next one
    return kind


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    size = init_distributed().size
    print(f"OUTCOMES {dict(check_cells(range(first, first + count), size, report))}", flush=True)
