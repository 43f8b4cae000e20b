"""All multi-rank cases (`tests/ranks/case_*.py`), one launch for each world size; and a launch in which ranks die."""

import re

import pytest
from launch import find_cases, run_cases, run_ranks


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


def test_a_dead_rank_is_an_error():
    """Whoever waits for it ends with an error that names the collective; in PyNative also the axis and ranks."""
    launched = run_ranks(6, "tests/ranks/dead_rank.py", timeout=150)
    for rank, said in enumerate(
        (
            r"all_reduce over tp \(ranks 0, 3\) failed on rank 0: another rank has died",
            r"all_gather over tp \(ranks 1, 4\) failed on rank 1: another rank has died",  # by messages, not reductions
            r"AllReduce|all_reduce over tp \(ranks 2, 5\)",  # in a graph, of which mostly MindSpore says what failed
        )
    ):
        ends = launched.logs[rank].split("ended after ")[1:]
        assert len(ends) == (2 if rank == 1 else 1), launched.tail(rank)
        for end in ends:
            seconds, _, error = end.partition(" s with: ")
            assert re.search(said, error), launched.tail(rank)
            assert int(seconds) < 60
    assert launched.logs[1].count("ended after 1 s") + launched.logs[1].count("ended after 0 s") >= 1  # shared memory
