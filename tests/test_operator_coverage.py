"""Which public functions of MindSpore become parallel, by `scripts/operator_coverage.py`, and docs/operators.md.

`tests/operator_coverage.json` has the counts, and what isn't covered. Every twelfth function is called daily, all of
them nightly. The numbers: `python scripts/operator_coverage.py --numbers`.
"""

import json
import sys
from collections import Counter

import pytest
from launch import ROOT

sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "scripts")]
from make_operators import PAGE, page, row  # noqa: E402
from operator_coverage import measure_all  # noqa: E402
from operator_samples.choice import all_targets, candidates  # noqa: E402
from operator_samples.report import recorded  # noqa: E402
from operator_samples.seed import CONSTRAINTS, IMPOSSIBLE, ROWS, spellings  # noqa: E402

RECORD = ROOT / "tests" / "operator_coverage.json"
EACH = 12  # of how many functions and rows one is measured daily


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
    """Outcomes of every twelfth function, and of all that every twelfth row of the page needs."""
    targets = [target for each in spaces.values() for target in each][::EACH]
    rows = [target for name in list(ROWS)[::EACH] for target in spellings(name)]
    return measure_all(list(dict.fromkeys(targets + rows)), tmp_path_factory.mktemp("coverage"))


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


def test_a_function_without_a_rule_is_told(tmp_path):
    """An operator that can't have a rule: so the measurement can fail."""
    found = measure_all(["ops.unique", "mint.abs"], tmp_path)
    assert found["mint.abs"]["outcome"] == "covered" and found["mint.abs"]["dims"] == {"0.0": "", "0.1": ""}
    assert found["ops.unique"]["outcome"] != "covered"


def test_samples_of_functions_that_are_not_listed():
    assert [each.text for each in candidates("mint.clone")][:2] == ["f(4, 8)", "f(4, 8), f(4, 8)"]
    assert candidates("nn.Softsign")[0].text == "; f(4, 8)"


@pytest.mark.nightly
def test_everything(spaces, record, tmp_path):
    found = measure_all([target for targets in spaces.values() for target in targets], tmp_path)
    assert json.loads(recorded(spaces, found)) == record, f"run scripts/operator_coverage.py --record {RECORD}"
    assert page(found) == PAGE.read_text("utf-8"), "run python docs/make_operators.py"
