"""Fixtures that several test files share."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from launch import run_ranks

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


@pytest.fixture(scope="session", autouse=True)
def with_dead_ranks(request):
    """A launch in which ranks die, as something to wait for; it begins early, since it waits for a minute itself."""
    wanted = [item for item in request.session.items if "with_dead_ranks_launched" in item.fixturenames]
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(run_ranks, 6, "tests/ranks/dead_rank.py", timeout=150) if wanted else None


@pytest.fixture
def with_dead_ranks_launched(with_dead_ranks):
    """What became of the launch in which ranks die."""
    return with_dead_ranks.result()
