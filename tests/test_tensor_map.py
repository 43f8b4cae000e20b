"""Parameters as boxes of file tensors, on random meshes: what ranks write makes up the files, and comes back."""

import numpy as np
import pytest

from mindformers_core.checkpoint.regions import inside, local_box, shape_of, whole
from mindformers_core.checkpoint.tensor_map import boxes_in_files
from mindformers_core.layout import Layout
from mindformers_core.models.spec import EACH, FileTensor

HEADS = {"q": (0, 8), "k": (8, 4), "v": (12, 4)}  # first row, rows
MAPS = {  # Parameters' shapes, the map, and the files of their arrays
    "renamed": (
        {"layers.1.up": (8, 4)},
        [("layers.*.up", (FileTensor("h.*.fc"),))],
        lambda one: {"h.1.fc": one["layers.1.up"]},
    ),
    "transposed": (
        {"layers.1.up": (8, 4)},
        [("layers.*.up", (FileTensor("h.*.fc", transposed=True),))],
        lambda one: {"h.1.fc": one["layers.1.up"].T},
    ),
    "fused qkv, transposed": (
        {f"0.{name}_proj": (rows, 4) for name, (_, rows) in HEADS.items()} | {"0.q_proj.bias": (8,), "other": (4,)},
        [
            ("*.q_proj.bias", (FileTensor("*.bias", at=(2, 12)),)),
            *(
                (f"*.{name}_proj", (FileTensor("*.c_attn", at=(first, 16), transposed=True),))
                for name, (first, _) in HEADS.items()
            ),
        ],
        lambda one: {
            "0.c_attn": np.concatenate([one[f"0.{name}_proj"] for name in HEADS]).T,
            "0.bias": np.pad(one["0.q_proj.bias"], 2),
            "other": one["other"],
        },
    ),
    "packed experts of one tensor": (  # its second dim is gates, then ups
        {"mlp.gate": (4, 8, 4), "mlp.up": (4, 8, 4)},
        [(f"*.{name}", (FileTensor("*.gate_up", at=(first, 16), dim=1),)) for name, first in (("gate", 0), ("up", 8))],
        lambda one: {"mlp.gate_up": np.concatenate([one["mlp.gate"], one["mlp.up"]], 1)},
    ),
    "gates and ups, a dim of the Parameter": (
        {"mlp.gate_up": (4, 2, 8, 4)},
        [("*.gate_up", tuple(FileTensor("*.gate_up", (None, k), dim=2, at=(8 * k, 16)) for k in range(2)))],
        lambda one: {"mlp.gate_up": one["mlp.gate_up"].reshape(4, 16, 4)},
    ),
    "these of each expert": (
        {"mlp.gate_up": (4, 2, 8, 4)},
        [("*.gate_up", tuple(FileTensor(f"*.#.{name}", (EACH, k), dim=2) for k, name in enumerate(("gate", "up"))))],
        lambda one: {
            f"mlp.{e}.{name}": one["mlp.gate_up"][e, k] for e in range(4) for k, name in enumerate(("gate", "up"))
        },
    ),
    "one file tensor an expert": (
        {"mlp.gate_up": (4, 16, 4), "mlp.down": (4, 4, 8)},
        [
            (
                "*.gate_up",
                (
                    FileTensor("*.experts.#.gate", rows=(0, 8), dim=1, index=(EACH,)),
                    FileTensor("*.experts.#.up", rows=(8, 16), dim=1, index=(EACH,)),
                ),
            ),
            ("*.down", (FileTensor("*.experts.#.down", dim=1, index=(EACH,), transposed=True),)),
        ],
        lambda one: (
            {f"mlp.experts.{e}.gate": one["mlp.gate_up"][e, :8] for e in range(4)}
            | {f"mlp.experts.{e}.up": one["mlp.gate_up"][e, 8:] for e in range(4)}
            | {f"mlp.experts.{e}.down": one["mlp.down"][e].T for e in range(4)}
        ),
    ),
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", MAPS)
def test_ranks_write_the_files_and_read_them_back(name, seed):
    shapes, tensor_map, files = MAPS[name]
    rng = np.random.default_rng(seed)
    arrays = {path: rng.integers(1, 10**6, shape) for path, shape in shapes.items()}
    layouts = {path: drawn_layout(rng, len(shape)) for path, shape in shapes.items()}
    expected, written = files(arrays), {}
    for rank in range(4):
        for path, array in arrays.items():
            held = local_box(layouts[path], array.shape, rank)
            local, back = array[inside(held, whole(array.shape))], np.zeros(shape_of(held), array.dtype)
            for tensor, shape, box, view in boxes_in_files(tensor_map, path, array.shape, held):
                place = inside(box, whole(shape))
                written.setdefault(tensor, np.zeros(shape, array.dtype))[place] = (
                    local if view is None else view.of(local)
                )
                (back if view is None else view.of(back))[...] = expected[tensor][place]
            np.testing.assert_array_equal(back, local, path)
    assert written.keys() == expected.keys()
    for tensor, array in expected.items():
        np.testing.assert_array_equal(written[tensor], array, tensor)


def drawn_layout(rng, ndim):
    """Each of two axes cuts a dim, perhaps one, or none."""
    axes = [None] * ndim
    for axis in ("a", "b"):
        dim = rng.integers(ndim + 1)
        if dim < ndim:
            axes[dim] = axis if axes[dim] is None else (axes[dim], axis)
    return Layout((2, 2), ("a", "b"))(*axes)


def test_a_map_that_lacks_rows_is_an_error():
    lacking = [("w", (FileTensor("a", rows=(0, 3)),))]
    with pytest.raises(ValueError, match="the tensor map has 6 of the 8 elements of 'w'"):
        boxes_in_files(lacking, "w", (4, 2), whole((4, 2)))
