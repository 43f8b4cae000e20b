"""Errors: where they happened, and whether on purpose. Attributes with other values for a while. What is done once.

Pure Python.
"""

import sysconfig
from contextlib import contextmanager
from functools import wraps
from opcode import opmap
from pathlib import Path
from threading import RLock

from mindformers_core.hints import message_of

_PACKAGE, _STANDARD = f"{Path(__file__).parent}/", f"{sysconfig.get_path('stdlib')}/"
_LIBRARIES = ("/mindspore/", "/numpy/", "/scipy/", "/yaml/")  # below a folder site-packages


@contextmanager
def errors_at(where, behind="", kinds=(TypeError, ValueError), kind=None):
    """While open, errors of these kinds get `where` in front of their text, and `behind` after it.

    They become of `kind`, without one `TypeError` or `ValueError`; an `OSError` stays of its own class. `origin_of`
    finds where they were raised before, unless a call right within has failed, whose argument then is at fault.
    """
    try:
        yield
    except kinds as error:
        kind = kind or (TypeError if isinstance(error, TypeError) else ValueError)
        kind = type(error) if isinstance(error, OSError) else kind
        inner = error.__traceback__ if _frames(error)[2:] else None  # the first two: this one, and that of the block
        raise kind(f"{where}{message_of(error)}{behind}").with_traceback(inner) from None


def origin_of(error):
    """Where an error is from, by the innermost frame of its traceback that is neither Python's nor a dependency's.

    `"raise"`: a `raise` statement, so somebody has foreseen it; `"user"`: other code outside of this package;
    `"package"`: this package's code, an `assert` too.
    """
    frame, place = _frames(error)[-1]
    is_raise = frame.f_code.co_code[place] == opmap["RAISE_VARARGS"] and not isinstance(error, AssertionError)
    return "raise" if is_raise else "package" if _is_own(frame) else "user"


def _frames(error):
    """Pairs (frame, place of its instruction) of a traceback, without those of libraries."""
    found, entry = [], error.__traceback__
    while entry is not None:
        found.append((entry.tb_frame, entry.tb_lasti))
        entry = entry.tb_next
    return [pair for pair in found if not _is_library(pair[0])]


def _is_own(frame):
    """Whether a frame is one of this package, or of a program that it has generated."""
    file, name = frame.f_code.co_filename, frame.f_globals.get("__name__") or ""
    return file.startswith(_PACKAGE) or name.startswith("mindformers_core_generated")


def _is_library(frame):
    file = frame.f_code.co_filename
    _, is_installed, rest = file.partition("/site-packages")
    standard = file.startswith(_STANDARD) and not is_installed
    return not _is_own(frame) and (standard or file.startswith("<frozen ") or rest.startswith(_LIBRARIES))


@contextmanager
def replaced(owner, **attributes):
    """While open, attributes of an object have other values."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}  # others are inherited
    for name, value in attributes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            setattr(owner, name, before[name]) if name in before else delattr(owner, name)


@contextmanager
def entered(table, name, value):
    """While open, a dict has another value at a name; then the one before, or None."""
    before = table.get(name)
    table[name] = value
    try:
        yield
    finally:
        table[name] = before


def once(function):
    """`function` at the first call in this process, while other threads wait for it; nothing at later calls."""
    lock, done = RLock(), []

    @wraps(function)
    def first():
        with lock:
            if not done:
                done.append(function())

    return first
