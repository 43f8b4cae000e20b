"""Fixtures that several test files share."""

import pytest

from mindformers_core.communication import init_distributed, shutdown


@pytest.fixture
def rank_0_of_4():
    """A world of 4 ranks in which nothing is sent."""
    shutdown()
    init_distributed("fake", world_size=4)
    yield
    shutdown()


@pytest.fixture
def one_rank():
    """A world of this process alone."""
    shutdown()
    init_distributed()
    yield
    shutdown()
