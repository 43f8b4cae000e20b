"""What is wrong with a file, said with its name. Pure Python."""

import mmap
from contextlib import contextmanager


@contextmanager
def read_as(path, kind, *errors):
    """While open, errors in reading a file, `OSError`s and others of these classes, say its path and its `kind`.

    Raises:
        OSError: the machine can't read it. ValueError: the others.
    """
    try:
        yield
    except (OSError, *errors) as error:
        said = str(error).splitlines()[0]
        raised = OSError if isinstance(error, OSError) else ValueError
        raise raised(f"{path} can't be read as {kind}: {said}") from error


def whole(array):
    """An array, mapped from a file or not.

    Raises:
        ValueError: its file has been cut off since: reading what isn't there would kill the process.
    """
    if isinstance(array.base, mmap.mmap) and (left := array.base.size()) < (size := array.offset + array.nbytes):
        raise ValueError(f"{array.filename} has been cut off while it was in use: {left} bytes are left of {size}")
    return array
