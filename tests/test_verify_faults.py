"""`verify()` finds planted faults, and its report names their places: those of `verify_faults.yaml`."""

import pytest
from support.launch import ROOT
from support.nightly import daily
from verify_faults import SUBJECTS, outcome, read_faults

FAULTS = read_faults()
QUICK = "stale-handle", "large-weights-are-not-updated"  # of small models; the other faults are nightly
BY_DAY = [each for each in FAULTS if each.name in QUICK]


@pytest.mark.parametrize("fault", daily(BY_DAY, FAULTS), ids=lambda fault: fault.name)
def test_a_fault_is_found_in_its_place(fault):
    report = outcome(fault.subject, fault)
    assert report, "not found"
    assert not [words for words in fault.report if words not in report], report
    assert report.startswith("a fault: ") == ("the first is on rank" in report)
    assert len(report.partition("\n\n---")[0].splitlines()) <= 15, report


@pytest.mark.nightly  # daily other tests of `verify()` find nothing
@pytest.mark.parametrize("subject", SUBJECTS)
def test_nothing_is_found_without_a_fault(subject):
    assert outcome(subject) == ""


def test_faults_fit_the_code():
    assert len(FAULTS) >= 80 and len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        assert fault.planted((ROOT / "mindformers_core" / fault.file).read_text())
        assert fault.subject in SUBJECTS and fault.report
