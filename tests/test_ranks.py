"""All multi-rank cases (`tests/ranks/case_*.py`), one launch for each world size; and a launch in which ranks die."""

import re

import pytest
from launch import find_cases
from timings import CASE

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    ("world_size", "case"),
    [pytest.param(size, case, marks=pytest.mark.nightly if nightly else ()) for size, case, nightly in find_cases()],
)
def test_case(launches, record_property, world_size, case):
    """A case passes on all its ranks."""
    results, _ = launches[world_size].result()
    record_property(CASE, (results[case].seconds, results[case].cpu_seconds))
    if results[case].failure is not None:
        pytest.fail(results[case].failure, pytrace=False)


@pytest.mark.ranks("dead_rank.py", 6)
def test_a_dead_rank_is_an_error(launches):
    """Whoever waits for it ends with an error that names the collective; in PyNative also the axis and ranks."""
    launched = launches["dead_rank.py"].result()
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
    assert re.search(r"ended after \d s", launched.logs[1]), launched.tail(1)  # shared memory has no need to wait
