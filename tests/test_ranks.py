"""All multi-rank cases (`tests/ranks/case_*.py`), one launch for each world size; and a launch in which ranks die."""

import re

import pytest
from support.launch import find_cases
from support.timings import CASE

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
    """All ranks end with one report; where the system tells of the death, with an error that names the collective."""
    launched = launches["dead_rank.py"].result()
    assert re.search(r"ended after \d s", launched.logs[1]), launched.tail(1)  # shared memory has no need to wait
    assert "all_gather over tp (ranks 1, 4) failed on rank 1: another rank has died" in launched.logs[1]
    for rank in range(3):
        said = launched.logs[rank]
        assert re.search(r"ranks? [345, -]+ (has|have) died \(no process\)", said), launched.tail(rank)
        assert re.search(r"- rank 0: in all_reduce over tp .*dead_rank\.py:\d+ in <module>", said), launched.tail(rank)
