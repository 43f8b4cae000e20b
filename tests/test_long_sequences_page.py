"""docs/long_sequences.md shows who sends what today."""

import os
import sys

from support.launch import ROOT
from support.svg_pictures import shapes, words

sys.path.insert(0, str(ROOT / "docs"))
from make_long_sequences import IMAGES, PAGE, draw_pictures  # noqa: E402


def test_the_pictures_are_up_to_date(tmp_path):
    """The same boxes and texts: how matplotlib writes them down differs between releases."""
    draw_pictures(tmp_path)
    drawn = sorted(os.listdir(tmp_path))
    assert drawn == sorted(path.name for path in IMAGES.glob("ring_*")), "run python docs/make_long_sequences.py"
    for name in drawn:
        assert f"(images/{name})" in PAGE.read_text(encoding="utf-8")
        for shown in (lambda path: shapes(path)[0], words):
            assert shown(IMAGES / name) == shown(tmp_path / name), f"{name}: run python docs/make_long_sequences.py"
