"""docs/propagation.md shows what the tool says today."""

import re
import sys

import pytest
from support.launch import ROOT

from mindformers_core.communication import shutdown

sys.path.insert(0, str(ROOT / "docs"))
from make_propagation import PAGE, blocks  # noqa: E402
from page_blocks import filled  # noqa: E402


@pytest.fixture(scope="module")
def made():
    shutdown()
    return blocks()


def test_the_page_is_up_to_date(made):
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, made) == page, "run python docs/make_propagation.py"


TENSOR = re.compile(r" +(?:input |parameter )?([%\w]+) .*float32 \[([\d, ]+)\](?: -> \[([\d, ]+)\])? ")


def test_the_example_is_the_seed_s(made):
    """The strategies that MindSpore's tutorial says come out: into how many parts what operators take is cut."""
    _, dense1, after, dense2 = re.split(r"^  dense\d  Dense|^  %3 = ", made["explained"], flags=re.MULTILINE)
    first, second = parts(dense1), parts(dense2)
    assert "%2 = MatMul(x, weight)" in dense1 and (first["x"], first["weight"]) == ((2, 1), (1, 4))
    assert "%4 = Add(%2, bias)" in dense1 and (first["%2"], first["bias"]) == ((2, 4), (4,))
    assert after.startswith("ReLU(%2)") and parts("  %3 = " + after)["%3"] == first["%4"] == (2, 4)
    assert "%2 = MatMul(x, weight)" in dense2 and (second["x"], second["weight"]) == ((2, 4), (4, 1))
    assert "%4 = Add(%2, bias)" in dense2 and (second["%2"], second["bias"]) == ((2, 1), (1,))


def parts(text):
    """Name of a tensor -> the number of parts of each of its dims, for the lines of one Cell."""
    found = {}
    for name, whole, local in (match.groups() for match in map(TENSOR.match, text.splitlines()) if match):
        sizes = [list(map(int, shape.split(", "))) for shape in (whole, local or whole)]
        found.setdefault(name, tuple(size // part for size, part in zip(*sizes)))
    return found


def test_the_picture_is_small():
    assert 10_000 < (PAGE.parent / "images" / "propagation.png").stat().st_size < 200_000
