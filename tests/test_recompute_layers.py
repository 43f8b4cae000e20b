"""Numbers of layers in every form in which they can be given, and errors for every other."""

import random

import pytest

from mindformers_core.recompute.layers import common_layers, layer_numbers


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        (None, None),
        (False, None),
        (True, True),
        ("0-7", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("0,3,5-7", (0, 3, 5, 6, 7)),
        (" 5 - 7 , 0", (0, 5, 6, 7)),
        ("12", (12,)),
        ("4-4", (4,)),
        ([0, 3], (0, 3)),
        (["5-7", 0], (0, 5, 6, 7)),
        ((0,), (0,)),
        (["0-3", "5"], (0, 1, 2, 3, 5)),
        ([9, "0-1,4"], (0, 1, 4, 9)),
    ],
)
def test_forms_of_layer_numbers(given, numbers):
    found = layer_numbers(given, "full")
    assert found == numbers and type(found) is type(numbers)


def random_layers(generator, numbers):
    """One of the ways to write a set of numbers: shuffled, neighbours joined or not, as a text or as a list."""
    parts, waiting = [], sorted(numbers)
    while waiting:
        end = 1
        while end < len(waiting) and waiting[end] == waiting[0] + end and generator.random() < 0.6:
            end += 1
        first, last = waiting[0], waiting[end - 1]
        alone = first == last and generator.random() < 0.7
        parts.append(f"{first}" if alone else f"{first}-{last}")
        waiting = waiting[end:]
    generator.shuffle(parts)
    if generator.random() < 0.5:
        return ",".join(parts)
    parts = [int(part) if part.isdigit() and generator.random() < 0.5 else part for part in parts]
    return parts if any(isinstance(part, str) for part in parts) else sorted(parts)  # numbers alone have an order


@pytest.mark.parametrize("seed", range(200))
def test_layer_numbers_of_any_set_written_in_any_way(seed):
    generator = random.Random(seed)
    numbers = set(generator.sample(range(40), generator.randint(1, 20)))
    given = random_layers(generator, numbers)
    assert layer_numbers(given, "full") == tuple(sorted(numbers)), given
    assert layer_numbers(layer_numbers(given, "full"), "full") == tuple(sorted(numbers))


LAYER_ERRORS = [
    (3, TypeError, "full: 3 should be true for all layers, a list of layer numbers, as [0, 3], or ranges of them, as "),
    (0.5, TypeError,
        "full: 0.5 should be true for all layers, a list of layer numbers, as [0, 3], or ranges of them, "),
    ({"layers": 1}, TypeError, "full: {'layers': 1} should be true for all layers"),
    ([True], TypeError, "full: True is no number of a layer: give true for all layers, a list of"),
    ([0.0], TypeError, "full: 0.0 is no number of a layer"),
    ([[0, 1]], TypeError, "full: [0, 1] is no number of a layer"),
    ([-1], ValueError, "full: -1 should be at least 0, the number of the first layer"),
    ([], ValueError, "full: [] has no layer in it: give true for all layers"),
    ("", ValueError, "full: '' is neither a layer's number nor a range: give true for all layers"),
    ("0,", ValueError, "full: '' is neither"),
    ("-1", ValueError, "full: '-1' is neither"),
    ("0-", ValueError, "full: '0-' is neither"),
    ("0-3-5", ValueError, "full: '0-3-5' is neither"),
    ("true", ValueError, "full: 'true' is neither a layer's number nor a range: give true for all layers, a list of"),
    (["all"], ValueError, "full: 'all' is neither a layer's number nor a range: give true for all layers, a list of"),
    ("0:3", ValueError, "full: '0:3' is neither"),
    ("1000000", ValueError, "full: '1000000' is neither"),
    ("0-1000000", ValueError, "full: '0-1000000' is neither"),
    ("1, 7-5", ValueError, "full: range '7-5' ends before it begins: try '5-7'"),
    ([3, 4, 4], ValueError,
        "full: layer 4 is given twice in [3, 4, 4]: these are numbers of layers of the whole model, from 0; how many"),
    ("0-3,2", ValueError, "full: layer 2 is given twice in '0-3,2'"),
    (
        [2, 1],
        ValueError,
        "full: [2, 1] should be in ascending order, [1, 2]: these are numbers of layers of the whole model, from 0; "
        "how many layers of each pipeline stage, as in MindSpore Transformers, can't be given",
    ),
    ((2, 0), ValueError, "full: (2, 0) should be in ascending order, [0, 2]: these are numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "message"), LAYER_ERRORS, ids=[str(error[0]) for error in LAYER_ERRORS])
def test_wrong_layer_numbers(given, kind, message):
    with pytest.raises(kind) as caught:
        layer_numbers(given, "full")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (True, True, True),
        (True, (1, 2), (1, 2)),
        ((1, 2), True, (1, 2)),
        ((0, 2, 4), (1, 2, 4), (2, 4)),
        ((0,), (1,), ()),
        (None, True, ()),
        (True, None, ()),
    ],
)
def test_common_layers(one, other, both):
    assert common_layers(one, other) == both
