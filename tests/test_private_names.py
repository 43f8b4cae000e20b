"""MindSpore's private names are in one module, and MindSpore is as it was until the package is first needed."""

import ast
import inspect
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from itertools import chain

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops
from mindspore.common.generator import default_generator
from mindspore.graph import api, jit_trace
from mindspore.ops.auto_generate import pyboost_inner_prim
from mindspore.ops.composite import base
from test_layers_of_the_house import MODULES, PACKAGE, ROOT, nodes_of, parse

from mindformers_core.scopes import once

HOME = f"{PACKAGE}.mindspore_private"
NAMED = {ast.Attribute: "attr", ast.keyword: "arg", ast.Constant: "value"}  # where a node has a name
OF_PYTHON = {"_exit", "_getframe", "_data", "_fields", "_make", "_replace"}  # of os, sys, os.environ, named tuples


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def paths_of(node):
    """Dotted paths that an import takes."""
    names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
    return [f"{node.module}.{name}" for name in names] if isinstance(node, ast.ImportFrom) else names


def names_in(tree):
    """`(line, name, node)` of the private names among attributes, named arguments and strings."""
    for node in nodes_of(tree):
        name = getattr(node, NAMED.get(type(node), ""), "")
        if isinstance(name, str) and name.isidentifier() and is_private(name):
            yield node.lineno, name, node


def defined_in(tree):
    """Names that a module defines: of functions, classes, fields, slots, and attributes of `self`."""
    for node in nodes_of(tree):
        yield from [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
        if isinstance(getattr(node, "ctx", None), ast.Store):
            yield getattr(node, "attr", getattr(node, "id", ""))
        if isinstance(node, ast.Assign):
            yield from (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))


HOME_NAMES = {name for _, name, _ in names_in(parse(MODULES[HOME]))}
# of the objects that the package meets, which it could take for its own
OBJECTS = Tensor(0.0), ms.Parameter(Tensor(0.0)), nn.Cell(), ops.ReLU(), default_generator
OF_OBJECTS = set(filter(is_private, chain.from_iterable(map(dir, OBJECTS))))
MINDSPORES = HOME_NAMES | OF_OBJECTS


@cache
def ours():
    """Names that any of our modules defines."""
    return {name for path in MODULES.values() for name in defined_in(parse(path))} | OF_PYTHON


def private_uses(tree):
    """`(line, name)` of the private names of MindSpore that a module uses.

    A class of ours may define a name that is one of MindSpore's, too: it is asked of `self`.
    """
    own = set(defined_in(tree))
    for node in nodes_of(tree):
        yield from ((node.lineno, path) for path in paths_of(node) if re.match(r"mindspore(\.\w+)*\._", path))
    for line, name, node in names_in(tree):
        if not isinstance(node, ast.Attribute):
            is_ours = name not in HOME_NAMES
        elif getattr(node.value, "id", "") == "self" and name in own:
            is_ours = True
        else:
            is_ours = name in ours() and name not in MINDSPORES
        if not is_ours:
            yield line, name


def test_private_names_are_in_one_module():
    wrong = [
        f"{path.relative_to(ROOT)}:{line} uses {name}"
        for module, path in MODULES.items()
        for line, name in (private_uses(parse(path)) if module != HOME else ())
    ]
    assert not wrong, f"private names of MindSpore are in {HOME} only:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "source, name",
    [
        ("from mindspore._c_expression import typing", "mindspore._c_expression.typing"),
        ("def late():\n    from mindspore import ops, _Function", "mindspore._Function"),
        ("import mindspore._extends.parse", "mindspore._extends.parse"),
        ("x._requires_grad", "_requires_grad"),
        ("x._retain_grad()", "_retain_grad"),
        ("x._new_and_unknown", "_new_and_unknown"),
        ("class Ours:\n    def __init__(self, cell):\n        self._cells = cell._cells", "_cells"),
        ("replaced(cell, _call_custom_bprop=1)", "_call_custom_bprop"),
        ("getattr(cell, '_params')", "_params"),
    ],
)
def test_a_private_name_is_seen(source, name):
    assert [found for _, found in private_uses(ast.parse(source))] == [name]


def test_each_private_name_exists():
    """Attributes and keys: importing the module has found the others. Cells get some only when they are compiled."""
    seen = import_module(HOME).SEEN_IN
    assert ms.__version__ == seen, f"{HOME} was written for MindSpore {seen}: look at each use, then change it"
    modules = amp, api, base, jit_trace, pyboost_inner_prim, import_module("mindspore.common.seed"), ms.common.device
    modules += nn.layer.rnns, ops.function.clip_func, ops.function.nn_func
    known = {*OF_OBJECTS, *chain.from_iterable(map(dir, modules))}
    known |= {*re.findall(r"\w+", inspect.getsource(api)), type(pyboost_inner_prim.softmax_impl).__name__[:8]}
    assert known >= HOME_NAMES, sorted(HOME_NAMES - known)


def snapshot():
    """What MindSpore's modules, classes and objects have: a dict by names."""
    found = {}
    for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "mindspore"]:
        for name, value in [*vars(module).items()]:
            found[module.__name__, name] = value
            kind = value if isinstance(value, type) else type(value)
            if str(getattr(kind, "__module__", "")).startswith("mindspore") and hasattr(value, "__dict__"):
                found |= {(module.__name__, name, inner): each for inner, each in vars(value).items()}
    return found


def import_all():
    """Import every module, and each public name; what of MindSpore is another then."""
    before = snapshot()
    for module in MODULES:
        if not module.endswith("__main__"):
            import_module(module)
    package = import_module(PACKAGE)
    assert all(getattr(package, name) is not None for name in package.__all__)
    now = snapshot()
    changed = [name for name, value in before.items() if now.get(name) is not value]
    return changed + [name for name in now if len(name) == 3 and name[:2] in before and name not in before]


@ms.jit
def double(x):
    return x * 2


def draw():
    return default_generator._step(Tensor(12, ms.int64))


@ms.jit
def draw_before():
    return draw()


def need_it():
    """The first need of a process whose tensors, compiled functions, draws and operators of its own are older."""
    import mindformers_core as core
    from mindformers_core.capture.capture import capture
    from mindformers_core.operators.rules.dims import equation
    from mindformers_core.tensor_parallel import custom_operator

    plain, own = Tensor(np.arange(4.0, dtype=np.float32)), custom_operator("TestOwn", lambda x: x + 1)
    core.register_operator("TestOwn", draws=True)(lambda x: equation("... -> ...", x))
    ms.manual_seed(7)
    draw(), draw_before()
    before = (*double(plain).asnumpy(), *own(plain).asnumpy(), *ms.get_rng_state().asnumpy())
    with ms.DeviceCtx("meta"):
        capture(nn.ReLU(), plain)
    methods = dict(vars(Tensor))
    assert {"__fallback__", "__setitem__", "__iadd__", "__init__"} <= methods.keys() and "__getitem__" not in methods
    assert before == (*double(plain).asnumpy(), *own(plain).asnumpy(), *ms.get_rng_state().asnumpy())
    core.init_distributed()
    whole = core.distribute_tensor(plain, (None,), core.init_device_mesh((1,), ("dp",)))
    item, added = plain.copy(), plain.copy()
    item[0] = whole[3]
    added += whole
    found = plain * whole, ops.stack((whole, whole)), own(whole), double(whole), item, added
    assert {type(each) for each in found} == {core.DTensor}
    assert item.full_tensor().asnumpy().tolist() == [3, 1, 2, 3]
    states = [tuple(map(int, step())) for step in (draw, ms.jit(draw), draw)]  # a graph's state is that of the last one
    assert states == [(7, offset) for offset in (24, 36, 48)]
    assert vars(Tensor) == methods


@pytest.mark.long
def test_mindspore_is_as_it_was_until_the_first_need():
    code = "import test_private_names as tests; print(tests.import_all()); tests.need_it()"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": paths, "GLOG_v": "3"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0 and done.stdout == "[]\n", done.stdout + done.stderr


def test_once_is_once_and_others_wait():
    runs = []

    @once
    def slow():
        time.sleep(0.05)
        runs.append(1)

    def work():
        slow()
        return len(runs)

    with ThreadPoolExecutor(4) as threads:
        assert [each.result() for each in [threads.submit(work) for _ in range(4)]] == [1] * 4
