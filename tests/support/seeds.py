"""Seeds of random tests: few in every run, many at night."""

import pytest


def seeds(few, many, step=1):
    """For `parametrize`: `range(0, many, step)`, of which all from `few` on are nightly."""
    return [pytest.param(seed, marks=pytest.mark.nightly if seed >= few else ()) for seed in range(0, many, step)]
