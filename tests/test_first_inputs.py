"""What ranks find when they compare their inputs, from descriptions: no rank runs."""

import re

import pytest

from mindformers_core.mesh import DeviceMesh
from mindformers_core.placement import Replicate, Shard
from mindformers_core.sharding.first_inputs import check_equal_shapes, suspicious_inputs

MESH = DeviceMesh((2, 2), ("dp", "tp"))  # ranks 0 and 1 are dp 0
NAMES = ("image", "label")


def described(values, varied=True):
    """Rank -> descriptions of an image and a label, whose values are told by one letter each."""
    return {
        rank: [(name, "float32[4, 8]", value, varied) for name, value in zip(NAMES, values[rank])] for rank in range(4)
    }


def warnings(values, declared=("dp", "dp"), varied=True):
    """What is said of values by rank."""
    placements = [
        {"dp": Shard(0) if axis == "dp" else Replicate(), "tp": Replicate()} if axis else {} for axis in declared
    ]
    return suspicious_inputs("Net", MESH, described(values, varied), placements)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (("aa", "aa", "bb", "bb"), ()),
        (("aa", "aa", "aa", "aa"), ("same 'image', 'label'", "2 ranks of dp", "full_batch")),
        (("aa", "aa", "ab", "ab"), ()),  # images may be alike by chance, with labels that aren't
        (("aa", "ba", "cc", "dc"), ("different values of 'image' ", "ranks of tp")),
        (("ab", "cd", "ef", "gh"), ("different values of 'image', 'label'", "ranks of tp")),
    ],
)
def test_parts_that_are_alike_and_wholes_that_are_not(values, names):
    found = warnings(values)
    assert len(found) == bool(names)
    assert all(name in found[0] for name in names)


def test_values_that_say_nothing():
    assert warnings(("aa",) * 4, varied=False) == []
    assert warnings(("ab", "cd", "ef", "gh"), declared=(None, None)) == []  # nobody knows how they lie
    assert len(warnings(("aa",) * 4, declared=("dp", "whole"))) == 1


def test_shapes_that_differ_are_an_error():
    same = described(("aa",) * 4)
    check_equal_shapes("Net", same)
    other = same | {2: [("image", "float32[3, 8]", "a", True), same[2][1]]}
    said = "Net is called with parts of different shapes: ranks 0, 1, 3 'image' float32[4, 8], 'label' float32[4, 8]; "
    with pytest.raises(ValueError, match=re.escape(said + "ranks 2 'image' float32[3, 8]")):
        check_equal_shapes("Net", other)
