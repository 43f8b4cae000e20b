"""The Python state that a captured `construct` reads besides tensors, and the guards by which a program depends on it.

Read are attributes of Cells, each as it is asked for, and what the code that runs names: globals, attributes of
modules, classes and objects such as a config, closures, defaults, and the contents of lists, dicts, sets and arrays
among all these. The idea of guards is that of TorchDynamo.
"""

import dis
import os
import random
import sys
import sysconfig
import uuid
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from itertools import repeat
from operator import is_
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np
from mindspore import Tensor, nn

from mindformers_core.capture.traced import Traced, owner_of
from mindformers_core.dtensor.dtensor import DTensor
from mindformers_core.program.structure import tree_leaves, tree_map

_MISSING = type("missing", (), {})
_TABLES = ("_params", "_buffers", "_cells", "_params_list")  # of a Cell, where other attributes are
_DICTS = (dict, MappingProxyType, UserDict, ChainMap)
_CONTAINERS = (*_DICTS, list, set, deque, UserList, array, bytearray, np.ndarray)
_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator)
_GLOBAL_GENERATORS = (random.random.__self__, np.random.rand.__self__)
_CHANGING = frozenset(  # functions of C that give another result at every call
    ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "now", "utcnow", "urandom")
)
_DRAWING_FILES = (random.__file__, uuid.__file__, str(random.__file__).replace("random.py", "secrets.py"))
_SPELLED_OUT = frozenset(("getattr", "vars", "__dict__", "asdict"))  # attributes whose names no code spells
CURES = "pass it as an argument of construct, a tensor; or mark the Cell, cell.eager() after shard()"
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
        asked: (id of a Cell, name) of the attributes that were read, or written.
        written: (id of a Cell, name) -> the Cell, of those that were written.
    """

    def __init__(self, running, error):
        self._running, self._error = running, error
        self._spaces = {}  # id of a holder of names -> (holder, its `get`, {name: (value, Read)})
        self._contents = {}  # id of a container -> (container, contents, Read)
        self._objects = {}  # id -> (object whose attributes code may read, its description)
        self.asked, self.written, self._codes, self._names = set(), {}, set(), {}
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
        self.asked.add((id(cell), name))
        read, get = Read(self._running(), sys._getframe(2).f_code, name, f"self.{name}"), vars(cell).get
        if name in attributes:
            if any(type(leaf) is DTensor for leaf in tree_leaves(attributes[name], Tensor)):
                raise self._error(
                    f"self.{name} is a tensor that an earlier call left there, and is read: what a call passes on to "
                    "the next is a Parameter, Parameter(…, requires_grad=False)"
                )
            self._read(cell, get, name, attributes[name], read)
        elif not any(name in (attributes.get(table) or ()) for table in _TABLES):
            owner = next((kind for kind in type(cell).__mro__ if name in vars(kind)), None)
            self._read(cell, get, name, _MISSING, read)
            if owner is not None and owner_of(_file_of(owner)) == "user":
                self._read(owner, vars(owner).get, name, vars(owner)[name], read)

    def cells(self, cell, code):
        """The Cells in a Cell are read."""
        self._read(cell, vars(cell).get, "_cells", vars(cell)["_cells"], Read(cell, code, "", "the Cells in it"))

    @contextmanager
    def reading(self, cell, construct):
        """While open, the `construct` of a Cell runs."""
        self._names.setdefault("construct", construct.__code__)
        for each in (construct.__func__, *type(cell).__mro__):
            self.consider(each, Read(cell, construct.__code__, "", each.__name__))
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def set_attribute(self, cell, name):
        """An attribute of a Cell is set: what is read later is of this call."""
        self.asked.add((id(cell), name))
        self.written[id(cell), name] = cell

    def finish(self, writes):
        """The `PythonState`; `writes` as there."""
        holders = [one for one, _, _ in self._contents.values() if isinstance(one, (list, deque, dict))]
        holders += [vars(one) for one, _ in self._objects.values() if isinstance(getattr(one, "__dict__", None), dict)]
        for one in (*holders, *(space for space, _, _ in self._spaces.values() if isinstance(space, dict))):
            for key, value in [*(one.items() if isinstance(one, dict) else enumerate(one))]:
                if id(value) not in self._contents and tree_leaves(value, Traced):
                    one[key] = LeftBehind()
        groups = [
            (partial(map, get, tuple(entries), repeat(_MISSING)), *zip(*entries.values()))
            for _, get, entries in self._spaces.values()
        ]
        groups += [(partial(_contents, one), seen, repeat(read)) for one, seen, read in self._contents.values()]
        return PythonState(tuple(groups), tuple(writes))

    def _enter(self, frame):
        """Code of the user's runs for the first time."""
        code, space = frame.f_code, frame.f_globals
        names = (*code.co_names, *(each for each in code.co_consts if isinstance(each, str)))
        new = {name: code for name in names if name not in self._names}
        self._names.update(new)
        for name in code.co_names:
            if name in space:
                self._read(space, space.get, name, space[name], Read(self._running(), code, name, name))
        if not {"getenv", "environ"}.isdisjoint(code.co_names):
            self.consider(os.environ, Read(self._running(), code, "getenv", "os.environ"))
        for name in () if code in self._inner else code.co_freevars:  # of those inside the variables are made anew
            self.consider(frame.f_locals.get(name), Read(self._running(), code, name, name))
        self._inner.update(each for each in code.co_consts if isinstance(each, CodeType))
        for one, what in list(self._objects.values()):
            self._attributes(one, what, new)

    def _read(self, holder, get, name, value, read):
        entries = self._spaces.setdefault(id(holder), (holder, get, {}))[2]
        if name not in entries:
            entries[name] = value, read
            self.consider(value, read)

    def consider(self, value, read):
        """Read what a value consists of, as far as code names it."""
        if id(value) in self._objects or isinstance(value, (Tensor, LeftBehind)):
            return
        if isinstance(value, _CONTAINERS):
            self._consider_container(value, read)
        elif isinstance(value, (tuple, frozenset)):
            for entry in value:
                self.consider(entry, read)
        elif isinstance(value, partial):
            self.consider((value.func, value.args, value.keywords), read)
        elif isinstance(value, MethodType):
            self.consider((value.__self__, value.__func__), read)
        elif isinstance(value, FunctionType):
            self._consider_function(value, read)
        elif isinstance(value, _GENERATORS):
            self._objects[id(value)] = value, read.what
        elif type(value).__name__ == "_Environ":
            self._consider_container(value._data, read)
        elif not isinstance(value, nn.Cell) or "_recorder" not in vars(value):
            self._consider_object(value, read)

    def _consider_function(self, function, read):
        if _is_users(function.__code__.co_filename):
            self._objects[id(function)] = function, read.what
            for cell in function.__closure__ or ():
                self._read(cell, partial(getattr, cell), "cell_contents", getattr(cell, "cell_contents", None), read)
            self.consider((function.__defaults__, function.__kwdefaults__), read)

    def _consider_object(self, one, read):
        """A class, a module, an object with attributes, or one that has another value later."""
        if isinstance(one, ContextVar):
            self._read(one, lambda _, missing: one.get(missing), "", one.get(_MISSING), read)
        if isinstance(one, Iterator) and not hasattr(one, "__dict__"):
            raise self._error(f"{read.what} is {one!r}, which gives something else at every call: {CURES}")
        kind = one if isinstance(one, (type, ModuleType)) else type(one)
        has_names = _is_users(_file_of(one)) if kind is one else hasattr(one, "__dict__") or hasattr(one, "__slots__")
        if has_names and owner_of(_file_of(kind)) == "user":
            self._objects[id(one)] = one, read.what
            self._attributes(one, read.what, self._names)
            bases = one.__bases__ if isinstance(one, type) else ()
            for each in (kind,) if kind is not one else bases:
                self.consider(each, read)

    def _consider_container(self, one, read):
        if id(one) not in self._contents:
            self._contents[id(one)] = one, _contents(one), read
            for entry in _contents(one):
                self.consider(entry, read)

    def _attributes(self, one, what, names):
        """Read the attributes of an object, class or module that have these names."""
        own = getattr(one, "__dict__", None)
        is_object = not isinstance(one, (type, ModuleType))
        if is_object and own and (id(one), "") not in self.asked and _reads_by_name(type(one), self._names):
            self.asked.add((id(one), ""))
            names = {**dict.fromkeys(own, next(iter(self._names.values()))), **names}
        get = partial(getattr, one) if own is None else own.get
        for name, code in names.items():
            if isinstance(one, nn.Cell) and name in attributes_of_any_cell():
                continue
            is_own = name in own if own is not None else name in getattr(one, "__slots__", ()) and hasattr(one, name)
            kinds = type(one).__mro__ if is_object and own is not None else ()
            if is_own or kinds and name in code.co_consts or any(name in vars(kind) for kind in kinds):
                self._read(one, get, name, get(name, _MISSING), Read(self._running(), code, name, f"{what}.{name}"))


@cache
def attributes_of_any_cell():
    """Names of what MindSpore itself keeps in a Cell, and changes while it runs."""
    return frozenset(vars(nn.Cell())) | {"_mutable_flags", "_func_graph_flags", "_recorder"}


def _reads_by_name(kind, names):
    """Whether attributes of an object are read without their names in code: `getattr`, names that the class maps."""
    maps_names = hasattr(kind, "__getattr__") or kind.__getattribute__ is not object.__getattribute__
    return _is_users(_file_of(kind)) and (maps_names or not _SPELLED_OUT.isdisjoint(names))


def _contents(one):
    if isinstance(one, np.ndarray):
        return (one.tobytes(), one.shape, one.dtype.str)
    return (len(one), *one, *one.values()) if isinstance(one, _DICTS) else (len(one), *one)


def _same(now, then, depth=8):
    """Whether a value computes the same as another one; what a call has left isn't read by the next."""
    if isinstance(now, LeftBehind):
        return True
    if now is then or type(now) is not type(then) or not depth:
        return now is then
    if isinstance(now, (int, str, bytes)):
        return now == then
    if isinstance(now, (tuple, frozenset, *_CONTAINERS)):
        pair = (now, then) if isinstance(now, (tuple, frozenset)) else (_contents(now), _contents(then))
        return len(pair[0]) == len(pair[1]) and all(_same(*entries, depth - 1) for entries in zip(*pair))
    if isinstance(now, MethodType):
        return now.__func__ is then.__func__ and now.__self__ is then.__self__
    if isinstance(now, (float, complex, np.generic, slice)):
        return repr(now) == repr(then)
    if isinstance(now, partial):
        return _same((now.func, now.args, now.keywords), (then.func, then.args, then.keywords), depth - 1)
    # all of it is in `__dict__`
    is_data = hasattr(now, "__dict__") and type(now).__basicsize__ == SimpleNamespace.__basicsize__
    is_data = is_data and not isinstance(now, (Tensor, nn.Cell, type, ModuleType, FunctionType))
    return is_data and owner_of(_file_of(type(now))) == "user" and _same(vars(now), vars(then), depth - 1)


def _file_of(kind):
    """The file of a module, or of the module of a class; "" for one that is built in."""
    name = kind.__name__ if isinstance(kind, ModuleType) else kind.__module__
    return getattr(sys.modules.get(name), "__file__", None) or ("" if name in sys.builtin_module_names else "/")


@cache
def _is_users(file):
    """Whether code of a file is the user's, or of a library that isn't Python's own."""
    own = not file or file.startswith(_STDLIB) and "-packages" not in file
    return not own and (owner_of(file) == "user" or file.startswith("<") and not file.startswith("<frozen"))
