"""Which public functions of MindSpore become parallel, by `scripts/operator_coverage.py`, and docs/operators.md.

`tests/operator_coverage.json` has the counts, and what is not covered. One function of `EACH` is called daily, all of
them nightly. The numbers: `python scripts/operator_coverage.py --numbers`.
"""

import json
import sys
from collections import Counter

import pytest
from operator_samples.calls import Sample
from operator_samples.choice import all_targets, candidates
from operator_samples.numbers import compare
from operator_samples.report import recorded
from operator_samples.seed import CONSTRAINTS, IMPOSSIBLE, ROWS, spellings
from support.launch import ROOT

from mindformers_core.operators import registry
from mindformers_core.operators.registry import FLOWS, OperatorFacts
from mindformers_core.operators.rules.dims import unary

sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "scripts")]
from make_operators import PAGE, page, row  # noqa: E402
from operator_coverage import measure_all  # noqa: E402

RECORD = ROOT / "tests" / "operator_coverage.json"
EACH = 192  # of how many functions and rows one is measured daily


@pytest.fixture(scope="module")
def spaces():
    """Namespace -> its functions."""
    return all_targets()


@pytest.fixture(scope="module")
def record():
    """What `--record` wrote."""
    return json.loads(RECORD.read_text("utf-8"))


@pytest.fixture(scope="module")
def sample(spaces, tmp_path_factory):
    """Outcomes of one function of `EACH`, and of all that every such row of the page needs."""
    targets = [target for each in spaces.values() for target in each][::EACH]
    rows = [target for name in list(ROWS)[::EACH] for target in spellings(name)]
    return measure_all(
        list(dict.fromkeys([*targets, *rows, "ops.unique", "mint.abs"])), tmp_path_factory.mktemp("coverage")
    )


@pytest.mark.ranks
def test_what_was_covered_is_covered(sample, record):
    known = {target for targets in record["missing"].values() for target in targets}
    lost = {target: each["detail"] for target, each in sample.items() if each["outcome"] != "covered"}
    assert not (found := {target: why for target, why in lost.items() if target not in known}), found


def test_every_public_name_is_counted(spaces, record):
    """A function that MindSpore adds, or one that is excluded newly, changes the counts."""
    counted = {space: len(targets) for space, targets in spaces.items()}
    assert counted == {space: each["public"] for space, each in record["counts"].items()}
    missing = Counter(len(targets) - len(set(targets)) for targets in record["missing"].values())
    assert set(missing) <= {0}
    for space, each in record["counts"].items():
        assert each["covered"] <= each["judged"] <= each["public"], space


@pytest.mark.ranks
def test_rows_of_the_page(sample):
    lines = PAGE.read_text("utf-8").splitlines()
    wrong = [line for name in list(ROWS)[::EACH] if (line := row(name, sample)) not in lines]
    assert not wrong, "run python docs/make_operators.py\n" + "\n".join(wrong)


def test_the_seed_s_table(spaces):
    """All rows, spellings that are measured, and no constraint or reason of an operator that isn't there."""
    every = {target for targets in spaces.values() for target in targets}
    assert len(ROWS) == 167
    assert set(CONSTRAINTS) <= set(ROWS) and set(IMPOSSIBLE) <= set(ROWS) and len(IMPOSSIBLE) <= 5
    assert not [target for name in ROWS for target in spellings(name) if target not in every]
    assert {name for name in ROWS if f"| {name} |" not in PAGE.read_text("utf-8")} == set()


@pytest.mark.ranks
def test_a_function_that_has_no_program_is_told(sample):
    assert sample["ops.unique"]["outcome"] != "covered"
    assert sample["mint.abs"]["outcome"] == "covered" and sample["mint.abs"]["dims"] == {"0.0": "", "0.1": ""}


def test_numbers_are_compared(monkeypatch):
    """A rule that says too much is found by its numbers: one that leaves a dim cut along which the tensor is turned."""
    sample = Sample("ops.flip", "f(4, 8), (1,)")
    assert compare(sample, pairs=1) == "equal"
    monkeypatch.setitem(registry._FACTS, "ReverseV2", OperatorFacts(rule=lambda x, dims: unary(x), gradient=FLOWS))
    assert compare(sample).startswith("differs, 0.1 over tp")


CALLS = {
    "ops.lerp": "f(4, 8), f(4, 8), f(4, 8)",  # its kernel takes no float64: compared in float32
    "Tensor.take": "f(4, 8), i(4, 2, high=32)",  # the operator has no CPU kernel, the method has
    "Tensor.diag": "f(4)",
}


@pytest.mark.parametrize("target", CALLS)
def test_numbers_without_a_kernel_of_float64(target):
    assert compare(Sample(target, CALLS[target])) == "equal"


def test_samples_of_functions_that_are_not_listed():
    assert [each.text for each in candidates("mint.clone")][:2] == ["f(4, 8)", "f(4, 8), f(4, 8)"]
    assert candidates("nn.Softsign")[0].text == "; f(4, 8)"


@pytest.mark.nightly
def test_everything(spaces, record, tmp_path):
    found = measure_all([target for targets in spaces.values() for target in targets], tmp_path)
    assert (
        "it crashes" in found["ops.stop_gradient_"]["detail"]
    )  # MindSpore 2.10 ends the process; the rest is measured
    assert json.loads(recorded(spaces, found)) == record, f"run scripts/operator_coverage.py --record {RECORD}"
    assert page(found) == PAGE.read_text("utf-8"), "run python docs/make_operators.py"
