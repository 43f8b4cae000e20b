"""Context managers: errors that say where they happened, and attributes with other values for a while. Pure Python."""

import inspect
from contextlib import contextmanager

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
    before = {name: inspect.getattr_static(owner, name) for name in attributes}
    _assign(owner, attributes)
    try:
        yield
    finally:
        _assign(owner, before)


@contextmanager
def entered(table, name, value):
    """While open, a dict has another value at a name; then the one before, or None."""
    before = table.get(name)
    table[name] = value
    try:
        yield
    finally:
        table[name] = before


def _assign(owner, attributes):
    for name, value in attributes.items():
        setattr(owner, name, value)
