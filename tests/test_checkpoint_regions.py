"""Boxes of global tensors: overlaps, runs of bytes, the writers of every byte, and checksums of parts."""

import math

import numpy as np
import pytest

from mindformers_core.checkpoint.checksums import MODULUS, checksum
from mindformers_core.checkpoint.regions import (
    balanced,
    cells,
    inside,
    local_box,
    overlap,
    runs,
    shape_of,
    split,
    volume,
    whole,
)
from mindformers_core.layout import Layout
from mindformers_core.mesh import DeviceMesh

SEEDS = range(40)


def slices(box):
    return inside(box, whole([stop for _, stop in box]))


def random_shape(rng, most=3):
    return tuple(int(size) for size in rng.integers(1, 9, rng.integers(0, most + 1)))


def random_box(rng, shape):
    ends = (sorted(rng.choice(size + 1, 2, replace=False)) for size in shape)
    return tuple((int(start), int(stop)) for start, stop in ends)


def random_layout(rng):
    """A layout on a mesh of up to 12 ranks, and a shape that it divides."""
    mesh = DeviceMesh(tuple(int(size) for size in rng.integers(1, 4, 3)), ("a", "b", "c"))
    dims = [[] for _ in range(rng.integers(1, 4))]
    for axis in rng.permutation(mesh.axis_names):
        if rng.random() < 0.7:
            dims[rng.integers(len(dims))].append(str(axis))
    layout = Layout.on(mesh, dims)
    return layout, tuple(layout.divisor(dim) * int(rng.integers(1, 4)) for dim in range(len(dims)))


@pytest.mark.parametrize("seed", SEEDS)
def test_overlap_is_that_of_the_sets_of_elements(seed):
    rng = np.random.default_rng(seed)
    shape = random_shape(rng)
    one, other = random_box(rng, shape), random_box(rng, shape)
    masks = np.zeros((2, *shape), bool)
    masks[(0, *slices(one))] = masks[(1, *slices(other))] = True
    common, shared = np.zeros(shape, bool), overlap(one, other)
    if shared is not None:
        common[slices(shared)] = True
        assert volume(shared) > 0
    np.testing.assert_array_equal(common, masks.all(0))


@pytest.mark.parametrize("seed", SEEDS)
def test_runs_are_the_bytes_of_the_box_in_order(seed):
    rng = np.random.default_rng(seed)
    shape = random_shape(rng, 4)
    box = random_box(rng, shape)
    values = np.arange(math.prod(shape)).reshape(shape)
    starts, length = runs(box, shape)
    starts = list(starts)
    read = np.concatenate([values.reshape(-1)[start : start + length] for start in starts])
    np.testing.assert_array_equal(read, values[slices(box)].reshape(-1))
    assert all(one + length < other for one, other in zip(starts, starts[1:])), "runs that touch would be one"


def test_rows_are_one_run():
    starts, length = runs(((2, 5), (0, 4), (0, 6)), (8, 4, 6))
    assert (list(starts), length) == ([48], 72)
    starts, length = runs((), ())
    assert (list(starts), length) == ([0], 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_cells_of_layouts_are_disjoint_whole_and_held(seed):
    """Of two layouts at once, as of a weight that two stages hold: boxes that overlap in part."""
    rng = np.random.default_rng(seed)
    boxes, shape = {}, None
    while len(boxes) < 2:
        layout, fitting = random_layout(rng)
        if shape in (None, fitting):
            shape = fitting
            boxes[len(boxes)] = [local_box(layout, shape, rank) for rank in layout.mesh.rank_list]
    held = [(place, box) for place, box in enumerate(boxes[0] + boxes[1])]
    count = np.zeros(shape, int)
    for cell, ranks in cells(held, shape).items():
        count[slices(cell)] += 1
        assert set(ranks) == {rank for rank, box in held if overlap(cell, box) == cell}
    assert (count == 1).all()


def test_cells_of_equal_boxes_are_the_boxes():
    assert cells([(0, ((0, 2),)), (3, ((2, 4),)), (1, ((0, 2),))], (4,)) == {((0, 2),): (0, 1), ((2, 4),): (3,)}
    assert cells([(0, ()), (1, ())], ()) == {(): (0, 1)}
    assert cells([(0, ((0, 0),))], (0,)) == {}
    with pytest.raises(ValueError, match=r"2 of the 4 elements of shape \(4,\) are on no rank"):
        cells([(0, ((1, 3),))], (4,))


@pytest.mark.parametrize("seed", SEEDS)
def test_split_boxes_are_small_disjoint_and_whole(seed):
    rng = np.random.default_rng(seed)
    shape = random_shape(rng)
    box, most = random_box(rng, shape), int(rng.integers(1, 12))
    pieces, count = split(box, most), np.zeros(shape, int)
    for piece in pieces:
        count[slices(piece)] += 1
        assert 0 < volume(piece) <= most
    assert (count[slices(box)] == 1).all() and count.sum() == volume(box)
    assert len(pieces) <= 1 + 2 * volume(box) / min(most, max(1, shape_of(box)[-1] if box else 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_writers_hold_what_they_write_and_are_balanced(seed):
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(1, 100, 60)]
    holders = [tuple(int(rank) for rank in rng.choice(6, rng.integers(1, 7), replace=False)) for _ in sizes]
    writers = balanced(sizes, holders)
    assert all(writer in ranks for writer, ranks in zip(writers, holders, strict=True))
    everywhere = balanced(sizes, [tuple(range(6))] * len(sizes))
    loads = [sum(size for size, writer in zip(sizes, everywhere) if writer == rank) for rank in range(6)]
    assert max(loads) - min(loads) <= max(sizes)


DTYPES = ("bool", "uint8", "float16", "float32", "int64", "complex128")


@pytest.mark.parametrize("seed", SEEDS)
def test_checksums_of_parts_add_up_to_that_of_the_whole(seed):
    rng = np.random.default_rng(seed)
    shape = random_shape(rng, 4)
    values = (rng.standard_normal(shape) * 100).astype(DTYPES[seed % len(DTYPES)])
    total = checksum(values, whole(shape), shape)
    pieces = split(whole(shape), int(rng.integers(1, 20)))
    assert sum(checksum(values[slices(piece)], piece, shape) for piece in pieces) % MODULUS == total
    turned = np.asfortranarray(values)
    assert checksum(turned, whole(shape), shape) == total


@pytest.mark.parametrize("dtype", DTYPES)
def test_checksums_see_every_flipped_bit(dtype):
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((5, 3, 4)) * 100).astype(dtype)
    assert checksum(values, whole(values.shape), values.shape) < MODULUS
    box, shape = ((2, 7), (0, 3), (4, 8)), (9, 3, 11)
    total, seen = checksum(values, box, shape), set()
    for position in range(values.nbytes):
        for bit in range(8):
            flipped = values.copy()
            flipped.reshape(-1).view(np.uint8)[position] ^= 1 << bit
            seen.add(checksum(flipped, box, shape))
    assert total not in seen and len(seen) == values.nbytes * 8


def test_checksums_see_positions():
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    sums = {checksum(values, whole(values.shape), values.shape)}
    for order in ((1, 0), (0, 1)):
        sums.add(checksum(values[list(order)][..., ::-1], whole(values.shape), values.shape))
    sums.add(checksum(values[:, ::-1], whole(values.shape), values.shape))
    sums.add(checksum(values, ((2, 4), (0, 3), (0, 4)), (4, 3, 4)))
    assert len(sums) == 5
    assert checksum(np.zeros((0, 3), np.float32), ((0, 0), (0, 3)), (0, 3)) == 0
    assert checksum(np.zeros((3, 0), np.float32), ((0, 3), (0, 0)), (3, 0)) == 0
