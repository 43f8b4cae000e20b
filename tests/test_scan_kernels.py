"""`scripts/scan_kernels.py`: what it finds, and, at night, that nothing new is found in a part of the operators."""

import json
import sys

import numpy as np
import pytest
from operator_calls.call import Call, f
from operator_samples.extremes import compared
from operator_samples.repeats import repeated
from support.launch import ROOT

sys.path.append(str(ROOT / "scripts"))
from scan_kernels import entries, page, scan  # noqa: E402

X = f(4, 8)
COVERAGE = {  # as `operator_coverage.py --json` writes it, of some operators that models call
    target: {"operators": [name], "sample": text, "cpu": True}
    for name, target, text in (
        ("CumProd", "ops.cumprod", "f(4, 8), 1"),
        ("Softmax", "ops.softmax", "f(4, 8), -1"),
        ("LogSoftmax", "ops.log_softmax", "f(4, 8), -1"),
        ("MatMul", "ops.matmul", "f(4, 8), f(8, 4)"),
        ("LayerNorm", "ops.LayerNorm", "1, 1; f(4, 8), f(8), f(8)"),
        ("SumExt", "mint.sum", "f(4, 8), 1"),
        ("ReduceMax", "ops.amax", "f(4, 8), 1"),
        ("CumSum", "ops.cumsum", "f(4, 8), 1"),
        ("Gather", "ops.gather", "f(4, 8), i(6), 1"),
        ("Conv2D", "nn.Conv2d", "4, 6, 3; f(2, 4, 8, 8)"),
        ("Exp", "ops.exp", "f(4, 8)"),
    )
}


def test_what_differs_from_numpy_is_told():
    assert compared(Call("Exp", [X], np.exp), np.exp) == {}
    assert compared(Call("Softmax", [X, (-1,)], None), lambda x, dim: x)["float32 equal"].endswith("(32 of 32)")
    with np.errstate(all="ignore"):
        assert "float32 nan" in compared(Call("ReLU", [X], None), lambda x: np.maximum(x, 0))  # 0 of NaN


def test_calls_that_change_are_counted():
    assert repeated("ops.exp", "f(4, 8)", 3) == {"calls": 3, "forward": 0, "gradient": 0, "long": True}
    assert repeated("ops.standard_normal", "(4, 8)", 3)["forward"] == 2
    assert repeated("ops.matmul", "f(4, 8), f(8, 4)", 3)["long"] is False  # long tensors don't fit


def test_a_page(tmp_path):
    """Of a scan that goes on with what is there."""
    todo = [
        ["bits", "Exp", "ops.exp", "f(4, 8)"],
        ["extremes", "Exp", 0, "Exp([4, 8])"],
        ["bits", "Sin", "ops.sin", ""],
    ]
    known = [
        [todo[0], {"calls": 9, "forward": 1, "gradient": "none", "long": True}],
        [todo[1], {"float32 nan": "0, NumPy nan"}],
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in known))
    done = scan(todo[:2], 9, tmp_path)
    assert done == [tuple(line) for line in known]
    text = page(done, todo)
    assert "| Exp | 1 | none |" in text and "| `Exp([4, 8])` | float32 nan | 0, NumPy nan |" in text
    assert "Time didn't suffice for: Sin." in text


@pytest.mark.nightly
def test_kernels_give_the_same_bits(tmp_path):
    todo = entries(COVERAGE, {name for each in COVERAGE.values() for name in each["operators"]})
    done = scan([entry for entry in todo if entry[0] == "bits"], 300, tmp_path)
    # without us, the gradient of CumProd differs once in 1,500 calls
    assert len(done) == len(COVERAGE)
    assert not [entry for entry, found in done if (found["forward"], found["gradient"]) != (0, 0)], done


@pytest.mark.nightly
def test_extremes_are_those_of_the_page(tmp_path):
    """docs/kernels.md names every call that differs from NumPy."""
    todo = [entry for entry in entries(COVERAGE, ("Softmax", "CumProd", "LogSoftmax", "Exp", "ReLU", "Mish"))]
    known = (ROOT / "docs" / "kernels.md").read_text("utf-8")
    done = scan([entry for entry in todo if entry[0] == "extremes"], 1, tmp_path)
    assert len(done) >= 6
    for (*_, text), found in done:
        assert not [where for where in found if f"| `{text}` | {where} |" not in known], (text, found)
