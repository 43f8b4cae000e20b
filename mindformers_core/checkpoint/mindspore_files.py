"""MindSpore's own files, `*.ckpt`, of one process: written from a checkpoint, and made into one."""

import json
import logging
import os
from contextlib import contextmanager

import mindspore as ms
from mindspore import dtype as mstype

from mindformers_core.checkpoint.index import CONFIG, STATE, Placed, encode_json
from mindformers_core.checkpoint.load import Checkpoint, check_tensors, load
from mindformers_core.checkpoint.parts import Part, tensors_of
from mindformers_core.checkpoint.regions import whole
from mindformers_core.checkpoint.save import save
from mindformers_core.communication.tensor_bytes import numpy_dtype
from mindformers_core.dtypes import dtype_name

_TEXTS, _MOMENTS = "mindformers_core/", "optimizer/"  # starts of the names of our documents, and of moments


def write_ckpt(checkpoint, path, names):
    """Write all tensors of a `Checkpoint`, which are verified, and its documents, into a `.ckpt` file: their number.

    Args:
        path: of the new file.
        names: a dict, path of a parameter -> name of its tensor in checkpoints, where they differ.

    Raises:
        ValueError: a damaged checkpoint, a tensor without elements, or a complex one. OSError: a file can't be read or
            written.
    """
    paths, tensors = {name: path for path, name in names.items()}, []
    for (_, name), placed in checkpoint.tensors.items():
        if not placed.nbytes or placed.dtype == "complex64":  # MindSpore 2.10 writes files that it can't read
            what = f"dtype {placed.dtype}" if placed.nbytes else "no elements"
            raise ValueError(f"tensor '{name}' has {what}, which a .ckpt file can't hold")

    def take(part, array):
        dtype = numpy_dtype(getattr(mstype, part.dtype.replace("bool", "bool_")))
        name = paths.get(part.name, part.name) if part.group == "model" else _MOMENTS + part.name
        tensors.append({"name": name, "data": ms.Tensor.from_numpy(array.view(dtype))})

    load(checkpoint, [_part(*key, placed) for key, placed in checkpoint.tensors.items()], take)
    known = ((CONFIG, checkpoint.config), (STATE, checkpoint.state))
    texts = {_TEXTS + name: encode_json(value, indent=1).decode() for name, value in known if value is not None}
    with _quiet():
        ms.save_checkpoint(tensors, path, append_dict=texts, crc_check=True)
    return len(tensors)


def read_ckpt(path, folder, names, parts=None, config=None):
    """Save the tensors of a `.ckpt` file, and the documents of one that `write_ckpt` has written, as a checkpoint.

    Args:
        path: of the file.
        folder: of the new checkpoint.
        names: as of `write_ckpt`.
        parts: the whole `Part`s of the model's parameters, all of which the file must have; what else it has is left
            out, except moments beside a state. Default: everything is taken.
        config: function of the contents of the file's own `config.json`, None if it has none, and of its place, for
            errors, that returns those of the new one. Default: they are the file's.

    Returns:
        The number of tensors, and the names of those that are left out.

    Raises:
        ValueError: not a whole file; a missing tensor, one of another shape, or what `config` raises. OSError: it
            can't be read or saved.
    """
    if not os.path.isfile(path):
        raise FileNotFoundError(f"'{path}' is no file")
    try:
        with _quiet():
            found = ms.load_checkpoint(path, crc_check=True)
    except ValueError as error:
        raise ValueError(f"{path} isn't a whole MindSpore checkpoint, or can't be read") from error
    texts = {name: found.pop(_TEXTS + name).encode() for name in (CONFIG, STATE) if _TEXTS + name in found}
    if config is not None:
        own = json.loads(texts[CONFIG]) if CONFIG in texts else None
        texts[CONFIG] = encode_json(config(own, f"{path}: {CONFIG}"), indent=1)
    tensors, placed = {}, {}
    for name, value in found.items():
        own = name.removeprefix(_MOMENTS)
        key = ("model", names.get(name, name)) if own == name else ("optimizer", own)
        if not isinstance(value, str):
            tensors[key], placed[key] = value, Placed(path, 0, dtype_name(value.dtype), tuple(value.shape))
    left = [key for key in placed if parts is not None and not (key[0] == "optimizer" and STATE in texts)]
    left = sorted(set(left) - {part.key for part in parts or ()})
    if parts is not None:
        check_tensors(
            Checkpoint(path, placed, {}, None, None), tensors_of({0: parts}), True, [name for _, name in left]
        )
    taken = [_part(*key, each) for key, each in placed.items() if key not in left]
    save(folder, taken, lambda part: tensors[part.key].asnumpy(), texts)
    return len(taken), [name for _, name in left]


def _part(group, name, placed):
    return Part(group, name, placed.dtype, placed.shape, whole(placed.shape))


@contextmanager
def _quiet():
    """Without MindSpore's log entries about errors, which it raises as well."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
