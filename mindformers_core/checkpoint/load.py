"""Loading on any mesh: every rank reads the bytes of its boxes, and all together verify them. Pure Python."""

import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby

from mindformers_core.checkpoint import index
from mindformers_core.checkpoint.checksums import MODULUS, checksum
from mindformers_core.checkpoint.folders import find_checkpoint
from mindformers_core.checkpoint.parts import Ranks, divide, on_all_ranks, parts_of_all, tensors_of
from mindformers_core.checkpoint.regions import inside, overlap, volume
from mindformers_core.checkpoint.slices import FileLayer, opened, read_box, read_bytes, read_file
from mindformers_core.dtypes import convert
from mindformers_core.hints import nearest
from mindformers_core.scopes import errors_at

# keys of `adapter_config.json`: those of other computations, and those that are needed
_OTHER_ADAPTERS = "use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save"
_SCALE = "r", "lora_alpha"


@dataclass(frozen=True)
class Checkpoint:
    """A folder with tensors, of ours or of Hugging Face's.

    Attributes:
        folder: its path.
        tensors: a dict, (group, name) -> `Placed`.
        pieces: a dict, (group, name) -> list of (box, checksum); {} for Hugging Face's.
        config: the contents of `config.json`, a dict; None where there is no such file.
        state: those of `state.json`; None for Hugging Face's.
        adapters: those of `adapter_config.json`, where it has low-rank adapters; then the tensors of the weights
            beneath are those of another folder, `base`; None where these are drawn from the seed.
    """

    folder: str
    tensors: dict
    pieces: dict
    config: dict | None
    state: dict | None
    adapters: dict | None = None
    base: str | None = None


@dataclass(frozen=True)
class LoadReport:
    """Bytes of tensors that this rank has read, needed, compared with checksums for all ranks; read by file."""

    read: int
    needed: int
    verified: int
    files: dict


def open_checkpoint(folder):
    """The `Checkpoint` in a folder: headers, lists and JSON files are read and verified, tensors aren't.

    Raises:
        FileNotFoundError: a missing file, or base of adapters. ValueError: a damaged one, which the error names, a
            newer format, or another kind of adapters.
    """
    found = _open(folder)
    if not any(group == "adapter" for group, _ in found.tensors):
        return found
    where = os.path.join(folder, index.ADAPTER_CONFIG)
    adapters = read_json(folder, index.ADAPTER_CONFIG, FileLayer()) or {}
    if odd := [key for key in _OTHER_ADAPTERS if adapters.get(key)] + [key for key in _SCALE if not adapters.get(key)]:
        raise ValueError(f"{where} has {odd[0]} {adapters.get(odd[0])!r}, but adapters here are B A lora_alpha / r")
    if not (base := adapters.get("base_model_name_or_path")):
        return replace(found, adapters=adapters)
    with errors_at(f"{where}, base_model_name_or_path: ", kinds=(OSError, ValueError)):
        below = _open(find_checkpoint(base))
    of_model = [{key: each for key, each in of.items() if key[0] == "model"} for of in (below.tensors, below.pieces)]
    tensors, pieces = of_model[0] | found.tensors, of_model[1] | found.pieces
    return replace(
        found, tensors=tensors, pieces=pieces, adapters=adapters, config=found.config or below.config, base=below.folder
    )


def _open(folder):
    files = FileLayer()
    if not os.path.isfile(os.path.join(folder, index.CHECKSUMS)):
        if os.path.isfile(os.path.join(folder, index.STATE)):
            raise FileNotFoundError(f"{folder} has {index.STATE}, but no {index.CHECKSUMS}: it isn't whole")
        is_adapter = os.path.isfile(os.path.join(folder, index.ADAPTERS))
        group, paths = ("adapter", [index.ADAPTERS]) if is_adapter else ("model", _hugging_face_files(folder, files))
        tensors = _headers(folder, group, paths, files)
        return Checkpoint(folder, tensors, {}, read_json(folder, index.CONFIG, files), None)
    sealed = index.open_sealed(
        os.path.join(folder, index.CHECKSUMS), read_file(files, os.path.join(folder, index.CHECKSUMS))
    )
    if sealed["format"] > index.FORMAT:
        raise ValueError(
            f"{folder} has format {sealed['format']}, but this version of mindformers_core reads up to {index.FORMAT}"
        )
    listed, tensors, pieces = sealed["files"], {}, {}
    for path, entry in listed.items():
        if "pieces" not in entry:
            _check(folder, path, read_file(files, os.path.join(folder, path)), entry["crc32"])
    for group, start in index.GROUPS.items():
        starts = f"{start}-", f"{start}."
        paths = [path for path, entry in listed.items() if "pieces" in entry and path.startswith(starts)]
        tensors |= _headers(folder, group, paths, files, listed)
        for name, of_tensor in ((name, found) for path in paths for name, found in listed[path]["pieces"].items()):
            pieces[group, name] = [(tuple(map(tuple, box)), int(found, 16)) for box, found in of_tensor]
    return Checkpoint(
        folder, tensors, pieces, read_json(folder, index.CONFIG, files), read_json(folder, index.STATE, files)
    )


def _hugging_face_files(folder, files):
    """Paths of the files with the tensors of a folder of Hugging Face's."""
    listed = read_json(folder, index.MODEL_INDEX, files)
    if listed is None:
        return ["model.safetensors"]
    try:
        return sorted(set(listed["weight_map"].values()))
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{os.path.join(folder, index.MODEL_INDEX)} has no weight_map, name -> file") from None


def _headers(folder, group, paths, files, listed=None):
    found = {}
    for path in paths:
        whole = os.path.join(folder, path)
        with opened(files, whole) as descriptor:
            read = partial(read_bytes, files, descriptor, whole)
            tensors, head = index.read_header(whole, read, files.size(descriptor))
        if listed is not None:
            _check(folder, path, head, listed[path]["crc32"])
        found |= {(group, name): placed for name, placed in tensors.items()}
    return found


def _check(folder, path, contents, expected):
    if index.crc_of(contents) != expected:
        raise ValueError(f"{os.path.join(folder, path)} is damaged: it isn't what {index.CHECKSUMS} lists")


def read_json(folder, path, files):
    """The contents of a JSON file in a folder; None if there is none. ValueError: it isn't JSON."""
    whole = os.path.join(folder, path)
    if not os.path.isfile(whole):
        return None
    with errors_at(f"{whole} isn't JSON: ", kinds=(ValueError,)):
        return json.loads(read_file(files, whole))


def load(checkpoint, parts, fill, ranks=None, converts=False, ignored=(), files=None):
    """Read this rank's parts of tensors; all ranks call this.

    Tensors are read one after another, so that memory is needed for the largest part only. All that is read is
    verified: ranks add up their checksums of the pieces in which the tensors were saved.

    Args:
        checkpoint: from `open_checkpoint`.
        parts: this rank's `Part`s. All ranks together have all tensors of the groups that they have parts of.
        fill: function of a `Part` and the NumPy array of its box, of unsigned numbers with the bits of the elements.
        ranks: the `Ranks`. Default: this process alone.
        converts: whether floats are converted where a file has another dtype. Otherwise that is an error.
        ignored: names of tensors of the files that no rank needs to have.
        files: the `FileLayer`.

    Returns:
        The `LoadReport` of this rank.

    Raises:
        ValueError: on all ranks: a missing or unexpected tensor, another shape or dtype, a damaged file; names file and
            tensor.
        OSError: on all ranks: a file that can't be read.
    """
    ranks, files = ranks or Ranks(), files or FileLayer()
    everywhere = parts_of_all(ranks, parts)
    check_tensors(checkpoint, tensors_of(everywhere), converts, ignored)
    owned = {key: [box for box, rank in pieces if rank == ranks.rank] for key, pieces in divide(everywhere).items()}
    counts, read = {"verified": 0}, Counter()

    def work():
        sums, left = [], None
        order = sorted(parts, key=lambda part: (checkpoint.tensors[part.key].file, checkpoint.tensors[part.key].offset))
        with ThreadPoolExecutor(1) as pool:  # checksums of a part, while the next one is read
            for path, group in groupby(order, key=lambda part: checkpoint.tensors[part.key].file):
                with opened(files, path) as descriptor:
                    for part in group:
                        placed = checkpoint.tensors[part.key]
                        array = read_box(files, descriptor, placed, part.box)
                        read[path] += array.nbytes
                        if left is not None:
                            sums += left.result()
                        pieces = checkpoint.pieces.get(part.key, ())
                        left = pool.submit(_sums, pieces, owned[part.key], part, array, counts)
                        fill(part, _converted(array, placed, part))
            return sums + (left.result() if left else [])

    _compare(checkpoint, on_all_ranks(ranks, work))
    needed = sum(volume(part.box) * checkpoint.tensors[part.key].item_bytes for part in parts)
    return LoadReport(read.total(), needed, counts["verified"], dict(read))


def _converted(array, placed, part):
    with errors_at(f"{placed.file}: '{part.name}': ", kinds=(ValueError,)):
        return convert(array, placed.dtype, part.dtype)


def check_tensors(checkpoint, wanted, converts, ignored):
    """Raise `ValueError` for the first tensor that differs from the files' one.

    Args:
        checkpoint, converts, ignored: as of `load`.
        wanted: a dict, (group, name) -> (dtype, shape).
    """
    groups = {group for group, _ in wanted} | {"adapter"}  # never left out silently
    names = {group: [name for each, name in checkpoint.tensors if each == group] for group in groups}
    for group, name in sorted(wanted):
        if (group, name) not in checkpoint.tensors:
            raise ValueError(f"{checkpoint.folder} has no {group} tensor '{name}'{nearest(name, names[group])}")
        placed, (dtype, shape) = checkpoint.tensors[group, name], wanted[group, name]
        if placed.shape != shape:
            raise ValueError(f"{placed.file}: '{name}' has shape {placed.shape}, not {shape} as in this model")
        floats = {"float16", "bfloat16", "float32"}
        takes = converts or checkpoint.base and group == "model"
        if placed.dtype != dtype and not (takes and {placed.dtype, dtype} <= floats):
            raise ValueError(f"{placed.file}: '{name}' has dtype {placed.dtype}, not {dtype} as in this model")
    for group in sorted(groups):
        known = [name for each, name in wanted if each == group]
        for name in sorted(set(names[group]) - set(known) - set(ignored)):
            raise ValueError(
                f"{checkpoint.tensors[group, name].file}: '{name}' isn't a tensor of this model{nearest(name, known)}"
            )


def _sums(pieces, owned, part, array, counts):
    """Checksums of the owned parts of the saved pieces, a list of (group, name, number of the piece, sum)."""
    found = {}
    for number, (box, _) in enumerate(pieces):
        here = overlap(box, part.box)
        for common in () if here is None else (overlap(here, mine) for mine in owned):
            if common is None:  # () is that of scalars
                continue
            values = array[inside(common, part.box)]
            found[number] = (found.get(number, 0) + checksum(values, common, part.shape)) % MODULUS
            counts["verified"] += values.nbytes
    return [(*part.key, number, total) for number, total in found.items()]


def _compare(checkpoint, everywhere):
    """Raise `ValueError` for the first piece whose checksum isn't that of the list."""
    totals = Counter()
    for *place, found in chain(*everywhere.values()):
        totals[tuple(place)] += found
    for (*key, number), found in sorted(totals.items()):
        box, expected = checkpoint.pieces[tuple(key)][number]
        if found % MODULUS != expected:
            raise _damaged(checkpoint, tuple(key), box)


def _damaged(checkpoint, key, box):
    ranges = ", ".join(f"{start}:{stop}" for start, stop in box)
    return ValueError(f"{checkpoint.tensors[key].file} is damaged: '{key[1]}'[{ranges}] isn't what was saved")


def check_checksums(checkpoint):
    """Read all tensors of one of our checkpoints, piece by piece: the number of bytes.

    Raises:
        ValueError: the first piece that isn't what was saved; names file, tensor and range. OSError: can't be read.
    """
    files, nbytes = FileLayer(), 0
    for key, placed in checkpoint.tensors.items():
        with opened(files, placed.file) as descriptor:
            for box, expected in checkpoint.pieces.get(key, ()):
                array = read_box(files, descriptor, placed, box)
                nbytes += array.nbytes
                if checksum(array, box, placed.shape) != expected:
                    raise _damaged(checkpoint, key, box)
    return nbytes
