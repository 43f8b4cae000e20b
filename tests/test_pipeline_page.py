"""docs/pipeline.md shows what the tools say today, and its example can be run."""

import os
import re
import subprocess
import sys

import pytest
from support.launch import ROOT

from mindformers_core.pipeline import MetaStepType, schedule_class
from mindformers_core.pipeline.tables.step import step_from_text

sys.path.insert(0, str(ROOT / "docs"))
from make_pipeline import EXAMPLE, PAGE, SCHEDULES, blocks  # noqa: E402
from page_blocks import filled  # noqa: E402


def test_the_page_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, blocks()) == page, "run python docs/make_pipeline.py"


def test_the_page_names_every_letter_and_schedule():
    page = PAGE.read_text(encoding="utf-8")
    for letters, kind in zip(("F", "B", "I", "W", "RF", "SF", "RB", "SB"), MetaStepType):
        assert re.search(rf"^\| `{kind.name}` \| `{letters}3@1` \|", page, re.MULTILINE), kind.name
        assert step_from_text(f"{letters}3@1").type == kind
    for name in SCHEDULES:
        assert f"| `{name}` | `{schedule_class(name).__name__}` |" in page


def test_the_example_looks_at_its_schedule_without_mindspore(tmp_path):
    blocked = (
        f"import sys, runpy; sys.modules['mindspore'] = None; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", blocked], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout in blocks()["example's output"]
    assert os.listdir(tmp_path) == ["early_1f1b.svg"]


def test_a_page_without_its_block_is_an_error():
    with pytest.raises(ValueError, match="the page has 0 blocks 'figures'"):
        filled("# A page\n", {"figures": "| a |\n"})
