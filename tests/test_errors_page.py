"""docs/errors.md can't rot: its quick cases run again, and say what the page says and what a message must name."""

import importlib.util
import sys

import pytest
from support.launch import ROOT
from support.nightly import daily


def load_make_errors():
    """The module docs/make_errors.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("make_errors", ROOT / "docs" / "make_errors.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make_errors = load_make_errors()
PRELUDE, SECTIONS = make_errors.load_cases()
CASES = {case.title: case for cases in SECTIONS.values() for case in cases}
QUICK = [title for title, case in CASES.items() if case.runs != "rarely"]


@pytest.fixture(scope="module")
def results(request):
    """What the selected quick cases say now."""
    params = [getattr(item, "callspec", None) and item.callspec.params for item in request.session.items]
    return make_errors.run_cases(PRELUDE, [CASES[each["title"]] for each in params if each and "title" in each])


@pytest.fixture(scope="module")
def text():
    return make_errors.PAGE.read_text(encoding="utf-8")


@pytest.mark.ranks
@pytest.mark.parametrize("title", daily(QUICK[::3], QUICK))
def test_an_error_is_as_on_the_page(results, text, title):
    case, (message, exit_code) = CASES[title], results[title]
    assert make_errors.problems(case, message, exit_code) == []
    assert make_errors.entry(case, message) in text, "changed since the page was made: run python docs/make_errors.py"


def test_the_page_has_all_cases_and_no_others(text):
    assert [line[4:] for line in text.splitlines() if line.startswith("### ")] == list(CASES)
    for case in CASES.values():
        start = text.index(f"### {case.title}\n")
        shown = text[start : text.index(f"\n{case.fix}\n", start)]
        assert case.code in shown and all(name in shown for name in case.names)
        assert not any(raw in shown for raw in ("C++ Call Stack", "Traceback", str(ROOT)))
