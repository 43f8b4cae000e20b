"""Contents of the files of a checkpoint: safetensors headers, indices, and the list of checksums. Pure Python.

A safetensors file is 8 bytes with the length of a JSON header, the header, and the data of tensors, one after another
in row-major order (https://github.com/huggingface/safetensors).
"""

import json
import re
import zlib
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from mindformers_core.dtypes import ITEM_BYTES

FORMAT = 1
CHECKSUMS, CONFIG, STATE, MODEL_INDEX = "checksums.json", "config.json", "state.json", "model.safetensors.index.json"
ADAPTERS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
GROUPS = MappingProxyType(  # group of tensors -> start of paths; adapters are in one file, as PEFT has it
    {"model": "model", "adapter": ADAPTERS.removesuffix(".safetensors"), "optimizer": "optimizer/optimizer"}
)
DATA_BYTES = 5 * 10**9  # of a file at most, unless one tensor is larger; as Hugging Face's files
_MOST_HEADER = 100_000_000  # bytes, as in the safetensors package
_DTYPES = {  # ours -> safetensors'
    "bool": "BOOL", "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64",
}  # fmt: skip
_OURS = {theirs: ours for ours, theirs in _DTYPES.items()}


@dataclass(frozen=True)
class Placed:
    """A tensor in a file.

    Attributes:
        file: path of the file in the checkpoint's folder.
        offset: position of the first byte in the file.
        dtype: name of the dtype.
        shape: of the whole tensor.
    """

    file: str
    offset: int
    dtype: str
    shape: tuple

    @property
    def item_bytes(self):
        """Bytes of an element."""
        return ITEM_BYTES[self.dtype]

    @property
    def nbytes(self):
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class TensorFile:
    """A safetensors file to be written.

    Attributes:
        path: in the checkpoint's folder.
        header: the first bytes, up to the data.
        nbytes: of the whole file.
        tensors: a dict, name -> `Placed`.
    """

    path: str
    header: bytes
    nbytes: int
    tensors: dict


def place_tensors(tensors, start, most=DATA_BYTES):
    """Place tensors in files `START-0000k-of-0000n.safetensors`, in the order of their names, layer 2 before layer 10;
    those of adapters in `ADAPTERS`.

    In a file wider dtypes come first, so that all data are aligned.

    Args:
        tensors: a dict, name -> (dtype, shape).
        start: of the paths.
        most: bytes of data of a file, which a tensor alone may exceed.

    Returns:
        A list of `TensorFile`s; the same for equal arguments, in whatever order.

    Raises:
        ValueError: a dtype that safetensors files don't have.
    """
    groups, held = [[]], 0
    for name in sorted(tensors, key=_natural):
        dtype, shape = tensors[name]
        if dtype not in _DTYPES:
            raise ValueError(f"tensor '{name}' has dtype {dtype}, which a safetensors file can't hold")
        nbytes = prod(shape) * ITEM_BYTES[dtype]
        if groups[-1] and held + nbytes > most and start != GROUPS["adapter"]:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += nbytes
    if start == GROUPS["adapter"]:
        return [_tensor_file(ADAPTERS, {name: tensors[name] for name in groups[0]})]
    return [
        _tensor_file(f"{start}-{number:05d}-of-{len(groups):05d}.safetensors", {name: tensors[name] for name in group})
        for number, group in enumerate(groups, 1)
    ]


def _natural(name):
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _tensor_file(path, tensors):
    described, position, offsets = {"__metadata__": {"format": "pt"}}, 0, {}  # transformers wants to be told "pt"
    for name in sorted(tensors, key=lambda name: -ITEM_BYTES[tensors[name][0]]):
        dtype, shape = tensors[name]
        offsets[name], start = position, position
        position += prod(shape) * ITEM_BYTES[dtype]
        described[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, position]}
    encoded = encode_json(described)
    encoded += b" " * (-len(encoded) % 8)
    header = len(encoded).to_bytes(8, "little") + encoded
    placed = {name: Placed(path, len(header) + offsets[name], dtype, tuple(shape)) for name, (dtype, shape) in
              tensors.items()}  # fmt: skip
    return TensorFile(path, header, len(header) + position, placed)


def read_header(path, read, size):
    """The tensors of a safetensors file, and its first bytes: `({name: Placed}, bytes)`.

    Args:
        path: of the file in its folder.
        read: function of a position and a number of bytes.
        size: bytes of the file.

    Raises:
        ValueError: not a safetensors file, or one of another size than its header says.
    """
    start = read(0, min(8, size))
    length = int.from_bytes(start, "little")
    if size < 8 or length > min(size - 8, _MOST_HEADER):
        raise ValueError(f"{path} isn't a whole safetensors file: {size} bytes, a header of {length}")
    encoded = read(8, length)
    try:
        described = {name: entry for name, entry in json.loads(encoded).items() if name != "__metadata__"}
        found = {name: _placed(path, 8 + length, entry) for name, entry in described.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a damaged header: {type(error).__name__} {error}") from None
    ends = {name: each.offset + each.nbytes for name, each in found.items()}
    end = max(ends.values(), default=8 + length)
    if end != size:
        cut = min((name for name in ends if ends[name] > size), key=ends.get, default=None)
        what = "it" if cut is None else f"'{cut}'"
        raise ValueError(f"{path} has {size} bytes, but the tensors of its header end at {end}: {what} isn't whole")
    return found, start + encoded


def _placed(path, data, entry):
    start, stop = entry["data_offsets"]
    placed = Placed(path, data + start, _OURS[entry["dtype"]], tuple(entry["shape"]))
    if stop - start != placed.nbytes or start < 0:
        raise ValueError(f"data_offsets {entry['data_offsets']} of a {entry['dtype']} of shape {entry['shape']}")
    return placed


def weight_map(files):
    """The bytes of `model.safetensors.index.json`, which names the file of every tensor."""
    tensors = {name: placed for file in files for name, placed in file.tensors.items()}
    total = sum(placed.nbytes for placed in tensors.values())
    names = {name: tensors[name].file for name in sorted(tensors, key=_natural)}
    return encode_json({"metadata": {"total_size": total}, "weight_map": names}, indent=1)


def encode_json(value, indent=None):
    """A value as JSON, in bytes; without `indent` in the least space."""
    return json.dumps(value, indent=indent, separators=(",", ":") if indent is None else None).encode()


def crc_of(contents):
    """The CRC-32 of bytes, as 8 hexadecimal digits."""
    return f"{zlib.crc32(contents):08x}"


def encode_sealed(value):
    """A dict as JSON with a checksum of its own, in bytes: see `open_sealed`."""
    return encode_json({"crc32": crc_of(encode_json(value)), "contents": value})


def open_sealed(path, contents):
    """The dict of `encode_sealed`.

    Raises:
        ValueError: any bit of `contents` differs; names the `path`.
    """
    try:
        value = json.loads(contents)["contents"]
        if encode_sealed(value) == contents:
            return value
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is damaged: its contents aren't those of its own checksum")
