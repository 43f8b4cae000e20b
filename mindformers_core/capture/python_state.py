"""The Python state that a captured `construct` reads besides tensors, and the guards by which a program depends on it.

Read are attributes of Cells, each as it is asked for, and what the code that runs names: globals, attributes of
modules, classes and objects such as a config, closures, defaults, and the contents of lists, dicts, sets and arrays
among all these. The idea of guards is that of TorchDynamo.
"""

import dis
import gc
import os
import random
import sys
import sysconfig
import types
import uuid
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from itertools import repeat
from operator import attrgetter, is_
from typing import NamedTuple

import numpy as np
from mindspore import Tensor, nn

from mindformers_core.capture.traced import Traced, owner_of
from mindformers_core.dtensor.dtensor import DTensor
from mindformers_core.mindspore_private import CELLS, FLAGS, PARAMETER_TABLES
from mindformers_core.program.structure import tree_leaves, tree_map

_MISSING = type("missing", (), {})
_TABLES = (*PARAMETER_TABLES, CELLS)  # of a Cell, where other attributes are
_FIXED = (tuple, frozenset, partial, types.MethodType)
_OF_FUNCTION = attrgetter("__code__", "__defaults__", "__kwdefaults__", "__closure__")
_PARTS = (  # kinds, and function that gives what such a one consists of: first the number of parts, where it varies
    ((dict, types.MappingProxyType, UserDict, ChainMap), lambda one: (len(one), *one, *one.values())),
    ((list, set, deque, UserList, array, bytearray, memoryview, tuple, frozenset), lambda one: (len(one), *one)),
    (np.ndarray, lambda one: (one.tobytes(), one.shape, one.dtype.str, *(one.flat if one.dtype.hasobject else ()))),
    (partial, attrgetter("func", "args", "keywords")),
    (types.MethodType, attrgetter("__self__", "__func__")),
    (types.FunctionType, lambda one: (len(vars(one)), *_OF_FUNCTION(one), *vars(one), *vars(one).values())),
    (types.CellType, lambda one: (*gc.get_referents(one), _MISSING)[:1]),  # it may be empty yet
    (ContextVar, lambda one: (one.get(_MISSING),)),
    (type(os.environ), lambda one: (one._data,)),
)
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_GLOBAL_GENERATORS = (random.random.__self__, np.random.rand.__self__)
_CHANGING = frozenset(  # functions of C that give another result at every call
    ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "now", "utcnow", "urandom")
)
_DRAWING_FILES = (random.__file__, uuid.__file__, str(random.__file__).replace("random.py", "secrets.py"))
_SPELLED_OUT = frozenset(("getattr", "vars", "__dict__", "asdict", "astuple"))  # attributes whose names no code spells
CURES = "pass it as an argument of construct, a tensor; or mark the Cell, cell.eager() after shard()"
_BY_REPR = (int, bool, str, bytes, float, complex, slice)
_STDLIB = sysconfig.get_paths()["stdlib"]


class Read(NamedTuple):
    """A place at which something was read: the Cell that ran, the code, the name in it, and a description."""

    cell: object
    code: object
    name: str
    what: str

    @property
    def source(self):
        """`file:line` of the first line with the name."""
        line = self.code.co_firstlineno
        for each in dis.get_instructions(self.code):
            line = each.starts_line or line
            if each.argval == self.name:
                break
        return f"{self.code.co_filename}:{line}"


class LeftBehind:
    """In the place of a tensor that a captured `construct` has put into a list, dict or object: any use is an error."""

    def _refuse(self, *_):
        raise ValueError(
            "a sharded Cell has put a tensor that it computes into a list, dict or object, where only this call of "
            "construct can read it: return it, or set an attribute of a Cell to it, or to a new list of tensors"
        )

    __getattr__ = __float__ = __array__ = __iter__ = __add__ = __radd__ = __mul__ = __rmul__ = _refuse


class PythonState(NamedTuple):
    """What a program depends on, and what it leaves, in Python.

    Attributes:
        groups: (function that gives the current values, the values that were read, their `Read`s).
        writes: (Cell, name, value) of the attributes that a call sets to something without tensors that it computes.
    """

    groups: tuple = ()
    writes: tuple = ()

    def changed(self):
        """`(Read, value then, value now)` of something that isn't as it was read; or None."""
        for current, seen, reads in self.groups:
            if not all(map(is_, current(), seen)):
                for read, then, now in zip(reads, seen, current()):
                    if not _same(now, then):
                        return read, then, now
        return None

    def replay(self):
        """Set the attributes; each time to containers of their own."""
        for cell, name, value in self.writes:
            setattr(cell, name, tree_map(lambda leaf: leaf, value))


class PythonReads:
    """Records the reads of one capture.

    Args:
        running: function that gives the Cell that runs.
        error: function that makes an error of a text.

    Attributes:
        asked: (id of a Cell, name) of the attributes that were read or written -> of those written, the Cell.
    """

    def __init__(self, running, error):
        self._running, self._error = running, error
        # (id, type of `get`) -> (holder, its `get`, {name: (value, Read)}); of a container (it, None, (parts, Reads))
        self._guards = {}
        self._objects = {}  # id -> (object whose attributes code may read, its description)
        self.asked, self._codes, self._names = {}, set(), {}  # names in code that has run -> this code
        self._inner = set()  # code of functions that are made by code that has run

    def profile(self, frame, event, called):
        """For `sys.setprofile`: what code runs, and which of its calls give another result each time."""
        if event == "call" and frame.f_code not in self._codes:
            self._codes.add(frame.f_code)
            file = frame.f_code.co_filename
            if _is_users(frame.f_globals.get("__file__", file) if file.startswith("<") else file):
                self._enter(frame)
        elif event == "c_call" and self._changes(called):
            while frame.f_code.co_filename in _DRAWING_FILES:
                frame = frame.f_back
            if _is_users(frame.f_code.co_filename):
                raise self._error(
                    f"{called.__qualname__}() gives something else at every call, and a program has it written in: "
                    f"draw by mindspore.ops, or {CURES}"
                )

    def _changes(self, called):
        owner = getattr(called, "__self__", None)
        if isinstance(owner, _GENERATORS):  # one that construct itself makes is in none of these
            return owner in _GLOBAL_GENERATORS or id(owner) in self._objects
        return called.__name__ in _CHANGING and getattr(owner, "__name__", "") in ("time", "datetime", "posix", "nt")

    def attribute(self, cell, name, attributes):
        """A Cell is asked for an attribute, first time; `attributes`: those that it has outside of the capture."""
        self.asked[id(cell), name] = None
        read, get = Read(self._running(), sys._getframe(2).f_code, name, f"self.{name}"), vars(cell).get
        if name in attributes:
            if any(type(leaf) is DTensor for leaf in tree_leaves(attributes[name], Tensor)):
                raise self._error(
                    f"self.{name} is a tensor that an earlier call left there, and is read: what a call passes on to "
                    "the next is a Parameter, Parameter(…, requires_grad=False)"
                )
            self._read(cell, get, name, attributes[name], read)
        elif not any(name in (attributes.get(table) or ()) for table in _TABLES):
            self._read(cell, get, name, _MISSING, read)
            self._name({name}, read.code)

    def cells(self, cell, code):
        """The Cells in a Cell are read."""
        self._read(cell, vars(cell).get, CELLS, vars(cell)[CELLS], Read(cell, code, "", "the Cells in it"))

    @contextmanager
    def reading(self, cell, construct):
        """While open, the `construct` of a Cell runs."""
        self._names.setdefault("construct", construct.__code__)
        for each in (construct.__func__, *type(cell).__mro__[2:]):  # those that the Cell has outside of the capture
            self.consider(each, Read(cell, construct.__code__, "", each.__name__))
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def finish(self, writes):
        """The `PythonState`; `writes` as there."""
        for one, *_ in (*self._guards.values(), *self._objects.values()):
            space = one if isinstance(one, (list, deque, dict)) else getattr(one, "__dict__", None)
            if isinstance(space, (list, deque, dict)) and not _is_captured(one):
                for key, value in [*(space.items() if isinstance(space, dict) else enumerate(space))]:
                    if (id(value), type(None)) not in self._guards and tree_leaves(value, Traced):
                        space[key] = LeftBehind()
        groups = []
        for one, get, entries in self._guards.values():
            if get or not isinstance(one, _FIXED):
                current = partial(map, get, tuple(entries), repeat(_MISSING)) if get else partial(_parts, one)
                groups.append((current, *(zip(*entries.values()) if get else entries)))
        return PythonState(tuple(groups), tuple(writes))

    def _enter(self, frame):
        """Code of the user's runs for the first time."""
        code, space = frame.f_code, frame.f_globals
        for name in code.co_names:
            if name in space:
                self._read(space, space.get, name, space[name], Read(self._running(), code, name, name))
        for name in [each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"]:
            for module in (name, f"{space.get('__package__')}.{name}".rstrip(".")):
                self.consider(sys.modules.get(module), Read(self._running(), code, name, module))
        if not {"getenv", "environ"}.isdisjoint(code.co_names):
            self.consider(os.environ, Read(self._running(), code, "getenv", "os.environ"))
        for name in () if code in self._inner else code.co_freevars:  # of those inside the variables are made anew
            self.consider(frame.f_locals.get(name), Read(self._running(), code, name, name))
        self._inner.update(each for each in code.co_consts if isinstance(each, types.CodeType))
        self._name((*code.co_names, *(each for each in code.co_consts if isinstance(each, str))), code)

    def _name(self, names, code):
        """Code names attributes: those of all objects that have been read are read."""
        new = {name: code for name in names if name.isidentifier() and name not in self._names}
        self._names.update(new)
        for one, what in list(self._objects.values()) if new else ():
            self._attributes(one, what, new)

    def _read(self, holder, get, name, value, read):
        """Guard a value that a holder has under a name, by its function `get(name, default)`, and read on."""
        entries = self._guards.setdefault((id(holder), type(get)), (holder, get, {}))[2]
        if name not in entries:
            entries[name] = value, read
            self.consider(value, read)

    def consider(self, value, read):
        """Read what a value consists of, as far as code names it: a container's parts, the attributes of an object."""
        if _is_captured(value) or id(value) in self._objects or isinstance(value, (Tensor, LeftBehind)):
            return
        parts, has_attributes = _parts(value), hasattr(value, "__dict__") or hasattr(value, "__slots__")
        if parts is None and isinstance(value, Iterator) and not hasattr(value, "__dict__"):
            raise self._error(f"{read.what} is {value!r}, which gives something else at every call: {CURES}")
        if parts and (id(value), type(None)) not in self._guards:
            self._guards[id(value), type(None)] = value, None, (parts, repeat(read))
            for part in parts:
                self.consider(part, read)
        kind = value if isinstance(value, (type, types.ModuleType)) else type(value)
        is_data = kind is not value and parts is None and owner_of(_file_of(kind)) == "user"
        if isinstance(value, _GENERATORS) or has_attributes and (is_data or _is_users(_file_of(kind))):
            self._objects[id(value)] = value, read.what
            self._attributes(value, read.what, self._names)
            for each in (type(value), *getattr(value, "__bases__", ())):
                self.consider(each, read)

    def _attributes(self, one, what, names):
        """Read the attributes of an object, class or module that have these names."""
        own, kind, is_object = getattr(one, "__dict__", None), type(one), not isinstance(one, (type, types.ModuleType))
        kinds = [each for each in (*getattr(one, "__mro__", ()), *kind.__mro__) if _is_users(_file_of(each))]
        maps_names = hasattr(kind, "__getattr__") or kind.__getattribute__ is not object.__getattribute__
        if is_object and own and kind in kinds and (maps_names or not _SPELLED_OUT.isdisjoint(self._names)):
            names = {**dict.fromkeys(own, next(iter(self._names.values()))), **names}  # which no code spells
        for name, code in [*names.items()]:
            if isinstance(one, nn.Cell) and name in attributes_of_any_cell():
                continue
            of_kind = next((vars(each)[name] for each in kinds if name in vars(each)), _MISSING)
            is_slot = isinstance(of_kind, types.MemberDescriptorType)
            is_asked = of_kind is not _MISSING or is_object and name in code.co_consts
            if is_slot or own is not None and (is_asked or name in own):
                get = partial(getattr, one) if is_slot else own.get
                self._read(one, get, name, get(name, _MISSING), Read(self._running(), code, name, f"{what}.{name}"))


def _is_captured(one):
    """Whether it is a Cell of the tree, whose attributes are read as they are asked for."""
    return isinstance(one, nn.Cell) and "_recorder" in vars(one)


@cache
def attributes_of_any_cell():
    """Names of what MindSpore itself keeps in a Cell, and changes while it runs."""
    return frozenset(vars(nn.Cell())) | FLAGS | {"_recorder"}


def _parts(one):
    """What a value consists of; None for a class, module or other object."""
    if isinstance(one, types.FunctionType) and not _is_users(one.__code__.co_filename):
        return ()
    function = _parts_of(type(one))
    return function and function(one)


@cache
def _parts_of(kind):
    return next((function for kinds, function in _PARTS if issubclass(kind, kinds)), None)


def _same(now, then, depth=8):
    """Whether a value computes the same as another one; what a call has left isn't read by the next."""
    if isinstance(now, LeftBehind):
        return True
    if now is then or type(now) is not type(then) or not depth or isinstance(now, types.FunctionType):
        return now is then
    if type(now) in _BY_REPR or isinstance(now, np.generic):
        return repr(now) == repr(then)
    pair = _all_of(now), _all_of(then)
    return pair[0] is not None and len(pair[0]) == len(pair[1]) and all(map(_same, *pair, repeat(depth - 1)))


def _all_of(one):
    """The parts of a value with its attributes; None where C code may keep more of it."""
    parts, own, kind = _parts(one), getattr(one, "__dict__", None), type(one)
    is_data = own is not None and kind.__basicsize__ == types.SimpleNamespace.__basicsize__
    return (*(parts or ()), own) if parts is not None or is_data and owner_of(_file_of(kind)) == "user" else None


def _file_of(kind):
    """The file of a module, or of the module of a class; "" for one that is built in."""
    name = kind.__name__ if isinstance(kind, types.ModuleType) else kind.__module__
    return getattr(sys.modules.get(name), "__file__", None) or ("" if name in sys.builtin_module_names else "/")


@cache
def _is_users(file):
    """Whether code of a file is the user's, or of a library that isn't Python's own."""
    own = not file or file.startswith(_STDLIB) and "-packages" not in file
    return not own and (owner_of(file) == "user" or file.startswith("<") and not file.startswith("<frozen"))
