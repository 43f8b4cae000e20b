"""docs/zero.md shows what the report says today; what is measured, and its code: tests/ranks/case_zero_page.py."""

import sys

import pytest
from support.launch import ROOT
from support.nightly import daily

from mindformers_core.communication import shutdown

sys.path.insert(0, str(ROOT / "docs"))
from make_zero import LARGE, PAGE, computed_tables  # noqa: E402
from page_blocks import filled  # noqa: E402


@pytest.mark.ranks
@pytest.mark.parametrize("names", daily([["llama3_8b"]], [["llama3_8b"], [*LARGE]]), ids=len)
def test_the_page_is_up_to_date(names):
    """By day the table of the smaller recipe, of the same formulas."""
    shutdown()
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, computed_tables(names)) == page, "run python docs/make_zero.py"
