"""The faults of the mutation exam fit the code as it is, and the exam reads pytest's output right; see `mutate.py`."""

import pytest
from mutate import FAULTS, first_failure, read_faults, recorded
from support.launch import ROOT
from test_layers_of_the_house import FLOORS

WITHOUT = {
    "hints",
    "scopes",
    "grouping",
    "dtypes",
    "splitmix",
    "lazy_exports",
    "files",
    "supervised",
    "ranges",
    "placement",
    "ops",
}
WITHOUT |= {"mindspore_private", "explaining", "hangs", "verification", "diff"}  # floors that the exam leaves out


@pytest.mark.parametrize("fault", read_faults(), ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault):
    whole = (ROOT / "mindformers_core" / fault.file).read_text()
    assert fault.planted(whole) != whole
    file, _, test = fault.found_by.partition("::")
    assert not file or (f"def {test.partition('[')[0]}(" if test else "def test_") in (ROOT / file).read_text(), (
        fault.found_by
    )
    with pytest.raises(ValueError, match=rf"{fault.name}: .* has it 0 times"):
        fault.planted(whole.replace(fault.old, fault.new))


def test_faults_are_on_all_floors():
    faults = read_faults()
    assert len(faults) >= 44
    assert len({fault.name for fault in faults}) == len(faults)
    assert {fault.floor for fault in faults} == {name.partition(".")[0] for name in FLOORS} - WITHOUT


def test_who_found_it_is_written_down():
    text = FAULTS.read_text()
    last = read_faults()[-1]
    written = recorded(text, last.name, 'tests/test_x.py::test_y["a: b"]')
    assert written != text and written.count("\n") == text.count("\n")
    assert 'test_y[\\"a: b\\"]"' in written.splitlines()[-1]


@pytest.mark.parametrize(
    ("exit_code", "output", "found"),
    [
        (0, "3 passed", ""),
        (1, "FAILED tests/test_x.py::test_y[a b - c::d] - assert [1] == 2\n", "tests/test_x.py::test_y[a b - c::d]"),
        (1, "FAILED tests/test_x.py::test_y\nFAILED tests/test_x.py::test_z\n", "tests/test_x.py::test_y"),
        (2, "ERROR tests/test_x.py - ImportError: no\n", "tests/test_x.py"),
        (4, "\nERROR: not found: tests/x.py::y\n", "pytest ended with 4: ['ERROR: not found: tests/x.py::y']"),
        (None, "", "it took too long"),
    ],
)
def test_the_first_failure(exit_code, output, found):
    assert first_failure(exit_code, output) == found
