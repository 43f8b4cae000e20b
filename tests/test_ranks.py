"""All multi-rank cases (`tests/ranks/case_*.py`): one launch for each world size, of the selected cases only."""

import pytest
from launch import find_cases, run_cases


@pytest.fixture(scope="session")
def failures(request):
    """Runs the selected cases of a world size at the first call, and remembers."""
    selected, done = {}, {}
    for item in request.session.items:
        if item.name.startswith("test_case["):
            selected.setdefault(item.callspec.params["world_size"], []).append(item.callspec.params["case"])

    def failures_of(world_size):
        if world_size not in done:
            done[world_size] = run_cases(world_size, selected[world_size])
        return done[world_size]

    return failures_of


@pytest.mark.parametrize(("world_size", "case"), find_cases())
def test_case(failures, world_size, case):
    """A case passes on all its ranks."""
    failure = failures(world_size)[case]
    if failure is not None:
        pytest.fail(failure, pytrace=False)
