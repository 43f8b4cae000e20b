"""Safetensors files that are laid out by us, read by the package safetensors; damaged headers; sealed lists."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindformers_core.checkpoint.index import (
    crc_of,
    encode_sealed,
    open_sealed,
    place_tensors,
    read_header,
    weight_map,
)

TENSORS = {
    "model.layers.10.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "model.layers.2.weight": np.arange(5, dtype=np.float16),
    "model.norm.bias": np.array([True, False, True]),
    "scale": np.array(2.5, np.float64),
    "none": np.zeros((0, 4), np.int32),
}


def described(tensors=TENSORS):
    return {name: (str(array.dtype), array.shape) for name, array in tensors.items()}


def contents(file):
    """The bytes of a file, with the data of its tensors."""
    found = bytearray(file.header.ljust(file.nbytes, b"\xff"))
    for name, placed in file.tensors.items():
        found[placed.offset : placed.offset + placed.nbytes] = TENSORS[name].tobytes()
    return bytes(found)


def reader(data):
    return lambda start, length: data[start : start + length]


@pytest.mark.parametrize("most", [10**9, 30])
def test_the_package_safetensors_reads_our_files(tmp_path, most):
    files, found = place_tensors(described(), "model", most), {}
    count = len(files)
    assert [file.path for file in files] == [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
    for file in files:
        (tmp_path / file.path).write_bytes(contents(file))
        found |= load_file(tmp_path / file.path)
        assert all(placed.offset % placed.item_bytes == 0 for placed in file.tensors.values())
        assert len(file.tensors) == 1 or sum(placed.nbytes for placed in file.tensors.values()) <= most
    assert found.keys() == TENSORS.keys() and (count > 1) == (most == 30)
    for name, array in found.items():
        assert array.dtype == TENSORS[name].dtype
        np.testing.assert_array_equal(array, TENSORS[name])
    index = json.loads(weight_map(files))
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in TENSORS.values())
    assert list(index["weight_map"]) == [
        "model.layers.2.weight", "model.layers.10.weight", "model.norm.bias", "none", "scale"
    ]  # fmt: skip


def test_the_order_of_the_tensors_does_not_matter():
    assert place_tensors(described(), "model", 30) == place_tensors(dict(reversed(described().items())), "model", 30)


def test_a_dtype_without_a_name_is_an_error():
    with pytest.raises(ValueError, match="tensor 'a' has dtype complex128, which"):
        place_tensors({"a": ("complex128", (2,))}, "model")


def test_headers_of_the_package_safetensors_are_read(tmp_path):
    save_file(TENSORS, tmp_path / "a.safetensors", {"format": "np"})
    data = (tmp_path / "a.safetensors").read_bytes()
    found, head = read_header("a.safetensors", reader(data), len(data))
    assert data.startswith(head) and found.keys() == TENSORS.keys()
    for name, placed in found.items():
        array = np.frombuffer(data, placed.dtype, placed.nbytes // placed.item_bytes, placed.offset)
        np.testing.assert_array_equal(array.reshape(placed.shape), TENSORS[name])


def test_damaged_headers_are_errors():
    data = contents(place_tensors(described(), "model")[0])
    for length in (0, 7, 8, 50, len(data) - 1):
        with pytest.raises(ValueError, match="^a.safetensors (isn't a whole|has )"):
            read_header("a.safetensors", reader(data[:length]), length)
    for old, new in ((b"F32", b"F33"), (b"[2,3]", b"[2,4]"), (b'"dtype"', b'"dtipe"'), (b"{", b"["), (b"0,", b"1,")):
        damaged = data.replace(old, new, 1)
        assert damaged != data
        with pytest.raises(ValueError, match="^a.safetensors has a damaged header"):
            read_header("a.safetensors", reader(damaged), len(damaged))


def test_every_flipped_bit_of_a_sealed_list_is_seen():
    value = {"format": 1, "tensors": {"a": [[[0, 4], "00ff"]]}, "files": {"b": {"bytes": 12}}}
    sealed = encode_sealed(value)
    assert open_sealed("checksums.json", sealed) == value
    for position in range(len(sealed)):
        for bit in range(8):
            damaged = bytearray(sealed)
            damaged[position] ^= 1 << bit
            with pytest.raises(ValueError, match="checksums.json is damaged"):
                open_sealed("checksums.json", bytes(damaged))
        with pytest.raises(ValueError, match="checksums.json is damaged"):
            open_sealed("checksums.json", sealed[:position])
    assert crc_of(b"123456789") == "cbf43926"
