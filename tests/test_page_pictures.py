"""Pictures of docs/long_sequences.md, docs/pipeline.md and docs/experts.md show what the tools draw today."""

import os
import sys

import pytest
from support.launch import ROOT
from support.svg_pictures import shapes, words

sys.path.insert(0, str(ROOT / "docs"))
import make_experts  # noqa: E402
import make_long_sequences  # noqa: E402
import make_pipeline  # noqa: E402

PICTURES = (make_long_sequences, "ring"), (make_pipeline, "pipeline"), (make_experts, "experts")


@pytest.mark.parametrize(("made", "prefix"), PICTURES)
def test_the_pictures_are_up_to_date(tmp_path, made, prefix):
    """The same boxes and texts: how matplotlib writes them down differs between releases."""
    made.draw_pictures(tmp_path)
    drawn, advice = sorted(os.listdir(tmp_path)), f"run python docs/{made.__name__}.py"
    assert drawn == sorted(path.name for path in made.IMAGES.glob(f"{prefix}_*")), advice
    for name in drawn:
        assert f"(images/{name})" in made.PAGE.read_text(encoding="utf-8")
        for shown in (lambda path: shapes(path)[0], words):
            assert shown(made.IMAGES / name) == shown(tmp_path / name), f"{name}: {advice}"
