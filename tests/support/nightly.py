"""Which of a test's many parameters every run takes, and which only the nightly one."""

import pytest

__all__ = ["daily", "seeds"]


def seeds(few, many, step=1):
    """For `parametrize`: `range(0, many, step)`, of which all from `few` on are nightly."""
    every = range(0, many, step)
    return daily([seed for seed in every if seed < few], every)


def daily(few, every):
    """For `parametrize`: every value, of which all but `few` are nightly; a tuple has several arguments."""
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=[pytest.mark.nightly] * (each not in few))
        for each in every
    ]
