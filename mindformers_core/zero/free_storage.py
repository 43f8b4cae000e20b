"""Gives a tensor's memory back while the tensor stays, and takes it again.

On CPU MindSpore's `untyped_storage().resize_(0)` loses the memory: it is never freed. So there the tensor keeps its
addresses, and the system gets the pages behind them (Linux, `madvise`); they come again, as zeros, when something is
written.
"""

import ctypes
import mmap

__all__ = ["free_storage", "allocate_storage"]

_DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)  # other systems have none
_SYSTEM = None if _DONT_NEED is None else ctypes.CDLL(None)


def _keeps_addresses(tensor):
    return _DONT_NEED is not None and tensor.device == "CPU"


def free_storage(tensor):
    """Nobody needs what is in a tensor's memory: free it, but for the rests of pages at both ends."""
    memory = tensor.untyped_storage()
    if not _keeps_addresses(tensor):
        memory.resize_(0)
        return
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (memory.data_ptr() + memory.size() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0 and _SYSTEM.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _DONT_NEED):
        raise MemoryError(f"the system doesn't take {length} bytes back")


def allocate_storage(tensor, nbytes):
    """A tensor has its memory again, with garbage in it."""
    if not _keeps_addresses(tensor):
        tensor.untyped_storage().resize_(nbytes)
