"""Atomic writing of files, and folders that one process at a time has. Pure Python."""

import fcntl
import os
import socket


def lock_folder(folder):
    """The open file `folder/.lock`: this process has the folder until it closes the file, or ends, whatever ends it.

    The file says which process that was. It stays, and means nothing without one that holds it. Some file systems have
    no locks: a line says so.

    Raises:
        BlockingIOError: another process has the folder. OSError: the file can't be made.
    """
    file = open(os.path.join(folder, ".lock"), "a+", encoding="utf-8")  # noqa: SIM115  (the caller closes it)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        text = f"another run has this folder, and goes on ({file.read()}): take another folder, or wait for its end"
        raise BlockingIOError(text) from None
    except OSError as error:
        print(f"warning: '{folder}': its file system has no locks ({error}): don't let two runs use it")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def write_whole(path, contents):
    """Write a file atomically: a reader finds its previous contents, or all of `contents`.

    Args:
        path: of the file; its folder has to exist.
        contents: bytes, or a text, which is written as UTF-8.

    Raises:
        FileNotFoundError: there is no such folder. IsADirectoryError: `path` is a folder itself.
    """
    folder = os.path.dirname(os.fspath(path))
    if folder and not os.path.isdir(folder):
        raise FileNotFoundError(f"'{os.fspath(path)}' can't be written: there is no folder '{folder}': make it before")
    if os.path.isdir(path):
        raise IsADirectoryError(f"'{os.fspath(path)}' can't be written: it is a folder: give the path of a file in it")
    unfinished = f"{os.fspath(path)}.{os.getpid()}.unfinished"
    try:
        with open(unfinished, "wb") as file:
            file.write(contents.encode() if isinstance(contents, str) else contents)
        os.replace(unfinished, path)
    except BaseException:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        raise
