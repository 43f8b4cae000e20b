"""docs/propagation.md shows what the tool says today."""

import re
import sys

import pytest
from launch import ROOT

from mindformers_core.communication import shutdown

sys.path.insert(0, str(ROOT / "docs"))
from make_propagation import PAGE, blocks, filled  # noqa: E402


@pytest.fixture(scope="module")
def made():
    shutdown()
    return blocks()


def test_the_page_is_up_to_date(made):
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, made) == page, "run python docs/make_propagation.py"


def test_the_example_is_the_seed_s(made):
    """The strategies that MindSpore's tutorial says come out: the parts of all operators' results."""
    _, text = made["explained"]
    found = re.findall(r"= (\w+)\(.* float32 \[([\d, ]+)\](?: -> \[([\d, ]+)\])? ", text)
    shapes = {(name, whole): local for name, whole, local in found}
    assert shapes["MatMul", "256, 64"] == shapes["Add", "256, 64"] == shapes["ReLU", "256, 64"] == "128, 16"
    assert shapes["MatMul", "256, 10"] == "128, 10"


def test_the_picture_is_small():
    assert 10_000 < (PAGE.parent / "images" / "propagation.png").stat().st_size < 200_000
