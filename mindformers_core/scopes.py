"""Errors that say where they happened, attributes with other values for a while, and what is done once. Pure Python."""

from contextlib import contextmanager
from functools import wraps
from threading import RLock

from mindformers_core.hints import message_of


@contextmanager
def errors_at(where, behind="", kinds=(TypeError, ValueError)):
    """While open, errors of these kinds get `where` in front of their text, and `behind` after it.

    They become `TypeError` or `ValueError`; an `OSError` stays of its own class.
    """
    try:
        yield
    except kinds as error:
        kind = type(error) if isinstance(error, OSError) else TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{where}{message_of(error)}{behind}") from None


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
