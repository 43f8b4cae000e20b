"""Generated modules in files: `save_source` and `load_source`. What a plan has is a number there: the reader has it."""

import io
import pickle
from hashlib import sha256

from mindformers_core.files import write_whole
from mindformers_core.generation.module_source import distinct_plans


def save_source(source, path):
    """Write a `ModuleSource`, one without observed tensors, to the file `path` atomically."""
    (*_, plan), buffer = source.functions, io.BytesIO()
    numbers = {id(part): number for number, part in enumerate(_parts(plan))}
    pickler = pickle.Pickler(buffer)
    pickler.persistent_id = lambda each: numbers.get(id(each))
    pickler.dump(source)
    write_whole(path, sha256(buffer.getbuffer()).digest() + buffer.getvalue())


def load_source(path, plan):
    """The `ModuleSource` of a file of `save_source`, for a plan equal to that of then.

    Raises:
        ValueError: the file is damaged. OSError: it can't be read.
    """
    with open(path, "rb") as file:
        checksum, contents = file.read(32), file.read()
    if checksum != sha256(contents).digest():
        raise ValueError(f"{path} is damaged: its contents have another checksum")
    unpickler = pickle.Unpickler(io.BytesIO(contents))
    unpickler.persistent_load = _parts(plan).__getitem__
    return unpickler.load()


def _parts(plan):
    """All that a `ModuleSource` may refer to in its plan, in order."""
    plans = distinct_plans(plan)
    return [part for each in plans for part in (each, *each.instructions, *each.graph.constants, *each.graph.kept)]
