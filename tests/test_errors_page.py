"""docs/errors.md can't rot: its quick cases run again, and say what the page says and what a message must name."""

import importlib.util
import sys

import pytest
from support.launch import ROOT


def load_make_errors():
    """The module docs/make_errors.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("make_errors", ROOT / "docs" / "make_errors.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make_errors = load_make_errors()
PRELUDE, SECTIONS = make_errors.load_cases()
CASES = [case for cases in SECTIONS.values() for case in cases]
QUICK = [case for case in CASES if case.runs != "rarely"]
TEXT = make_errors.PAGE.read_text(encoding="utf-8")


@pytest.mark.ranks
@pytest.mark.waits
@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.nightly)])
def test_errors_are_as_on_the_page(tmp_path, every):
    cases = QUICK[::every]
    results = make_errors.run_cases(PRELUDE, cases)
    assert [problem for case in cases for problem in make_errors.problems(case, *results[case.title])] == []
    stale = [case.title for case in cases if make_errors.entry(case, results[case.title][0]) not in TEXT]
    assert not stale, "changed since the page was made: run python docs/make_errors.py"


def test_the_page_has_all_cases_and_no_others():
    assert [line[4:] for line in TEXT.splitlines() if line.startswith("### ")] == [case.title for case in CASES]
    for case in CASES:
        start = TEXT.index(f"### {case.title}\n")
        shown = TEXT[start : TEXT.index(f"\n{case.fix}\n", start)]
        assert case.code in shown and all(name in shown for name in case.names)
        assert not any(raw in shown for raw in ("C++ Call Stack", "Traceback", str(ROOT)))
