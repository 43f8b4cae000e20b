"""Numbers of layers in every form in which they can be given, and errors for every other."""

import pytest

from mindformers_core.recompute.settings import layer_numbers


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        (None, None),
        (False, None),
        (True, True),
        ("0-7", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("0,3,5-7", (0, 3, 5, 6, 7)),
        ([0, 3], (0, 3)),
        (["5-7", 0], (0, 5, 6, 7)),
        (["0-3", "5"], (0, 1, 2, 3, 5)),
        ([9, "0-1,4"], (0, 1, 4, 9)),
    ],
)
def test_forms_of_layer_numbers(given, numbers):
    found = layer_numbers(given, "full")
    assert found == numbers and type(found) is type(numbers)


LAYER_ERRORS = [
    (3, TypeError, "full: 3 should be true for all layers, a list of layer numbers, as [0, 3], or ranges of them, as "),
    ([True], TypeError, "full: [True] should be true for all layers, a list of"),
    ([-1], ValueError, "full: '-1' is neither a number from 0 to 99999 nor a range: give true for all"),
    ([], ValueError, "full: [] has no layer in it: give true for all layers"),
    ("0-", ValueError, "full: '0-' is neither"),
    ("true", ValueError, "full: 'true' is neither a number from 0 to 99999 nor a range: give true for all"),
    ("0-1000000", ValueError, "full: '0-1000000' is neither"),
    ("1, 7-5", ValueError, "full: the range '7-5' ends before it begins: write 5-7"),
    ([3, 4, 4], ValueError, "full: [3, 4, 4] gives a layer twice"),
    ((2, 0), ValueError, "full: (2, 0) should be in ascending order, [0, 2]"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "message"), LAYER_ERRORS, ids=[str(error[0]) for error in LAYER_ERRORS])
def test_wrong_layer_numbers(given, kind, message):
    with pytest.raises(kind) as caught:
        layer_numbers(given, "full")
    assert message in str(caught.value)
