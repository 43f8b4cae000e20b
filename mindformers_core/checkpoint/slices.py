"""Byte ranges of files: boxes of tensors, and whole small files, through one layer of system calls. Pure Python."""

import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from mindformers_core.checkpoint.regions import runs, shape_of, volume

_FLAGS = {"read": os.O_RDONLY, "write": os.O_WRONLY, "make": os.O_WRONLY | os.O_CREAT | os.O_TRUNC}
WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


@dataclass(frozen=True)
class FileLayer:
    """The system calls of a checkpoint; tests inject faults and count bytes in subclasses."""

    def make_folder(self, path):
        """Make a folder, and those above it; one that exists stays."""
        os.makedirs(path, exist_ok=True)

    def open(self, path, mode):
        """Open a file to `"read"` it, to `"write"` into it, or to `"make"` it; returns its descriptor."""
        return os.open(path, _FLAGS[mode], 0o666)

    def close(self, descriptor):
        """Close a file."""
        os.close(descriptor)

    def resize(self, descriptor, nbytes):
        """Set the size of a file; new bytes are zero."""
        os.ftruncate(descriptor, nbytes)

    def size(self, descriptor):
        """Bytes of a file."""
        return os.fstat(descriptor).st_size

    def write(self, descriptor, data, position):
        """Write bytes at a position; returns the number of those written, at least one."""
        return os.pwrite(descriptor, data, position)

    def read(self, descriptor, buffer, position):
        """Fill a buffer from a position on; returns the number of bytes read, 0 at the end of the file."""
        return os.preadv(descriptor, [buffer], position)

    def sync(self, descriptor):
        """Wait until a file, or a folder's list of names, is on the disk."""
        os.fsync(descriptor)

    def rename(self, path, target):
        """Rename a file or folder, atomically."""
        os.rename(path, target)

    def remove(self, folder):
        """Remove a folder with its contents, if there is one."""
        shutil.rmtree(folder, ignore_errors=not os.path.isdir(folder))

    def free(self, folder):
        """Bytes that can be written into the file system of a folder."""
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize


@contextmanager
def opened(files, path, mode="read", sync=False):
    """The descriptor of an open file, which is synced at the end if asked; errors of the block name the path."""
    descriptor = files.open(path, mode)
    try:
        yield descriptor
        if sync:
            files.sync(descriptor)
    except OSError as error:
        raise error if error.filename else type(error)(error.errno, error.strerror, path) from error
    finally:
        files.close(descriptor)


def read_file(files, path):
    """All bytes of a small file."""
    with opened(files, path) as descriptor:
        return read_bytes(files, descriptor, path, 0, files.size(descriptor))


def read_bytes(files, descriptor, path, position, count):
    """Bytes of an open file from a position on; errors as of `read_all`."""
    contents = bytearray(count)
    read_all(files, descriptor, memoryview(contents), position, path)
    return bytes(contents)


def write_file(files, path, contents):
    """Write a new file, and wait until it is on the disk."""
    with opened(files, path, "make", sync=True) as descriptor:
        write_all(files, descriptor, contents, 0)


def read_box(files, descriptor, placed, box):
    """The box of a tensor, an array of unsigned numbers with the bits of the elements (complex128: as it is).

    Raises:
        ValueError: the file ends before; names it.
    """
    found = np.empty(volume(box) * placed.item_bytes, np.uint8)
    for part, position in _ranges(placed, box):
        read_all(files, descriptor, found[part].data, position, placed.file)
    return found.view(WORDS[placed.item_bytes]).reshape(shape_of(box))


def write_box(files, descriptor, placed, box, array):
    """Write the box of a tensor from an array of its shape."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    for part, position in _ranges(placed, box):
        write_all(files, descriptor, data[part], position)


def _ranges(placed, box):
    """Pairs: a slice of the box's own bytes, and where these begin in the file."""
    starts, length = runs(box, placed.shape)
    nbytes = length * placed.item_bytes
    for number, start in enumerate(starts):
        yield slice(number * nbytes, (number + 1) * nbytes), placed.offset + start * placed.item_bytes


def read_all(files, descriptor, buffer, position, path):
    """Fill a buffer from a position of a file on.

    Raises:
        ValueError: the file ends before; names the `path`.
    """
    while buffer:
        count = files.read(descriptor, buffer, position)
        if not count:
            raise ValueError(f"{path} ends at byte {position}: it isn't whole")
        buffer, position = buffer[count:], position + count


def write_all(files, descriptor, data, position):
    """Write bytes at a position."""
    data = memoryview(data)
    while data:
        count = files.write(descriptor, data, position)
        data, position = data[count:], position + count
