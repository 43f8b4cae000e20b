"""Arrays that are mapped from files. Pure Python."""

import mmap


def whole(array):
    """An array, mapped from a file or not.

    Raises:
        ValueError: its file has been cut off since: reading what isn't there would kill the process.
    """
    if isinstance(array.base, mmap.mmap) and (left := array.base.size()) < (size := array.offset + array.nbytes):
        raise ValueError(f"{array.filename} has been cut off while it was in use: {left} bytes are left of {size}")
    return array
