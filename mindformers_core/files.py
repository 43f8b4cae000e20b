"""Atomic writing of files. Pure Python."""

import os


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
