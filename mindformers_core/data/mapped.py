"""Arrays that are mapped from files. Pure Python."""

import mmap


def intact(array):
    """An array, mapped from a file or not.

    Raises:
        ValueError: its file has been cut off since: reading what isn't there would kill the process.
    """
    base = getattr(array, "base", None)
    if isinstance(base, mmap.mmap) and (left := base.size()) < (size := array.offset + array.nbytes):
        raise ValueError(f"{array.filename} has been cut off while it was in use: {left} bytes are left of {size}")
    return array
