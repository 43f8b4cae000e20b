"""Source code of an operator call that PyNative runs and `@ms.jit` compiles.

The `OpCall` of an operator in `__fallback__` can't be compiled. The forms that can be, in the order of the search: a
Tensor's method, where the operator is a variant of one without a kernel on every device (`DeprecatedSum`, `TopkExt`); a
ready object that takes all arguments by position (`matmul_ext_op`, `concat_impl`), as fast as any form in PyNative; and
a class, of which one instance is made for each set of attributes (`ops.LayerNorm`).
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from operator import attrgetter

import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import Primitive, auto_generate
from mindspore.ops.auto_generate import cpp_create_prim_instance_helper, gen_ops_prim, pyboost_inner_prim

from mindformers_core.lowering.corrected import OWN_FUNCTIONS
from mindformers_core.mindspore_private import PYBOOST, Type, type_id_to_type
from mindformers_core.operators import TensorMeta
from mindformers_core.operators.registry import facts_of, rewritten
from mindformers_core.operators.signature import spelled
from mindformers_core.operators.words import WORDS
from mindformers_core.program.structure import DType, structure_text, tree_fill, tree_leaves

_REQUIRED = inspect.Parameter.empty
_NAMED = frozenset({"beta", "alpha", "dtype", "output_size"})  # keyword-only parameters of methods and `full_like`
_DTYPES = frozenset({"dtype", "output_type", "dst_type"})  # parameters that arrive as the numbers of dtypes


class NamedTensor(TensorMeta):
    """A tensor among the arguments of an operator: global shape, dtype, layout, and the variable that holds it."""

    __slots__ = ("name",)

    def __init__(self, name, shape, dtype, layout=None):
        super().__init__(shape, dtype, layout, constant=False)
        self.name = name


@dataclass(frozen=True)
class Call:
    """One operator call, ready to be written.

    Attributes:
        imports: lines that the module needs at its top.
        instance: None, or (name to start from, constructor expression) of an object to be made once, in the module.
        function: a function, the `instance`, or, with a leading dot, a method of the first argument.
        args: source for constants, and the placeholders of tensors; tuples may hold either.
        kwargs: likewise, by name.
    """

    imports: tuple
    instance: tuple | None
    function: str
    args: tuple
    kwargs: dict = field(default_factory=dict)

    def expression(self, name_of: Callable, function: str | None = None) -> str:
        """The call as source.

        Args:
            name_of: placeholder -> name of the variable that holds the tensor.
            function: the name that the `instance` got in the module, if not the one to start from.
        """
        args = [_written(argument, name_of) for argument in self.args]
        function = function or self.function
        if function.startswith("."):
            function = args.pop(0) + function
        args += [f"{key}={_written(value, name_of)}" for key, value in self.kwargs.items()]
        return f"{function}({', '.join(args)})"


@dataclass(frozen=True)
class _Form:
    """How an operator is called.

    Attributes:
        imports: an import line, or "".
        function: as in `Call`; of a class its name.
        parameters: name -> default, of the call; None where they are unknown, and arguments are passed as they came.
        attributes: name -> default, of the constructor; None where there is nothing to construct.
    """

    imports: str
    function: str
    parameters: dict | None
    attributes: dict | None = None


def operator_source(name: str, args: tuple, kwargs: dict | None = None, attributes: dict | None = None) -> Call:
    """The `Call` of one operator.

    Args:
        name: the operator's name in `__fallback__`.
        args, kwargs: its own arguments; in the place of every tensor an object that has its `shape` and `dtype`.
        attributes: of a classic primitive, its attributes by name (`primitive.init_attrs`).

    Raises:
        ValueError: no source is known for the operator; says how to add it.
        TypeError: the arguments don't fit its parameters.
    """
    new_name, args, kwargs = rewritten(name, tuple(args), dict(kwargs or {}))
    form = _form(new_name)
    if form is None:
        raise ValueError(
            f"operator '{name}' has no source that @ms.jit can compile: say how it is called where it is registered, "
            f"@register_operator('{name}', source='my_package.my_function')"
        )
    if form.parameters is None:
        given = tuple(_constant("", value) for value in args)
        named = {key: _constant(key, value) for key, value in kwargs.items()}
    else:
        values = _bound(name, form, args, kwargs, attributes or {})
        given, named = _in_order(name, form, form.parameters, values)
    if form.attributes is None:
        return _call(form.imports, None, form.function, given, named)
    constants, _ = _in_order(name, form, form.attributes, values)
    instance = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", new_name).lower() + "_op"
    return _call(form.imports, (instance, f"{form.function}({', '.join(map(_written, constants))})"), instance, given)


def node_source(node, args, kwargs, hint):
    """The `Call` of an `OperatorNode` with other tensors, or other arguments, than its own.

    Args:
        node, args, kwargs: the node, and arguments as of `operator_source`.
        hint: the name to start from of the instance of a classic primitive.
    """
    primitive = node.primitive
    if primitive is None or kwargs or args[primitive.inputs :] != node.args[primitive.inputs :]:
        return operator_source(node.operator, args, kwargs, primitive and primitive.attributes)
    named = {key: literal(value) for key, value in primitive.attributes.items()}
    kind = getattr(import_module(primitive.module), primitive.name)
    names = _parameters(kind.__call__, skipped=1) if "__call__" in vars(kind) else ()
    given = tuple(_constant(name, value) for name, value in zip((*names, *[""] * len(args)), args[: primitive.inputs]))
    module, _, function = source_of(primitive.name).rpartition(".")
    if module not in ("", "ops"):
        return _call(f"from {module} import {function}", None, function, given, named)
    constructor = f"{primitive.name}({', '.join(f'{key}={text}' for key, text in named.items())})"
    return _call(f"from {primitive.module} import {primitive.name}", (hint, constructor), hint, given)


def operator_function(node, args, kwargs, spelled=str):
    """An operator as a function of the tensors among its arguments, in order, that calls it as generated code does.

    Args:
        node, args, kwargs: as of `node_source`; of tensors shape and dtype count.
        spelled: a function of the source that gives the one to use. Default: the source itself.

    Raises:
        ValueError, TypeError: as of `operator_source`.
    """
    tensors = tree_leaves((args, kwargs), (Tensor, TensorMeta))
    named = [NamedTensor(f"tensor_{n}", each.shape, str(each.dtype).lower()) for n, each in enumerate(tensors)]
    call = node_source(node, *tree_fill((args, kwargs), named, (Tensor, TensorMeta)), "operator")
    body = f"    return {call.expression(attrgetter('name'))}"
    made = [" = ".join(call.instance)] if call.instance else []
    head = f"def call({', '.join(each.name for each in named)}):"
    return _compiled(spelled("\n".join([*call.imports, *made, head, body])))


@lru_cache(maxsize=1 << 14)
def _compiled(text):
    """The function `call` that a text defines."""
    space = {}
    exec(text, space)
    return space["call"]


def _call(imports, instance, function, args, kwargs=None):
    """A `Call` with its import lines; `imports` is one of them, or ""."""
    dtypes = ["import mindspore as ms"] if "ms." in f"{instance} {args} {kwargs}" else []
    return Call((*filter(None, [imports]), *dtypes), instance, function, args, kwargs or {})


def _bound(name, form, args, kwargs, attributes):
    """Values by parameter: given by position (the constructor's behind the call's), by name, or as `attributes`."""
    names = [*form.parameters, *(form.attributes or ())]
    values = dict(zip(names, args))
    unknown = list(args[len(names) :])
    for key, value in spelled(kwargs, names).items():
        unknown += [key] * (key in values or key not in names)
        values[key] = value
    if unknown:
        raise TypeError(f"operator '{name}' takes ({', '.join(names)}) and got {', '.join(map(repr, unknown))} besides")
    values = {key: value for key, value in attributes.items() if key in (form.attributes or ())} | values
    return {parameter: _constant(parameter, value) for parameter, value in values.items()}


def _in_order(name, form, parameters, values):
    """`values` by position and by name; defaults stand in the gaps, and at the end of ready objects that take no fewer.

    Arguments of a method are passed on even where they equal the defaults, which differ among its variants (`x.std()`
    on CPU).
    """
    usual = {parameter: _constant(parameter, default) for parameter, default in parameters.items()}
    given = {parameter: values.get(parameter, default) for parameter, default in usual.items()}
    missing = [parameter for parameter, value in given.items() if value is _REQUIRED]
    if missing:
        raise TypeError(f"operator '{name}' needs its argument {', '.join(missing)}")
    by_name = _NAMED if form.function.startswith((".", "ops.full_like")) else ()
    named = {parameter: given.pop(parameter) for parameter in usual if parameter in by_name}
    kept = given if form.function.endswith("_impl") else values if form.function.startswith(".") else ()
    for parameter in reversed([*given]):
        if parameter in kept or not _same(given[parameter], usual[parameter]):
            break
        del given[parameter]
    return tuple(given.values()), {key: value for key, value in named.items() if not _same(value, usual[key])}


def _same(value, usual):
    return isinstance(value, str) and value == usual


def _constant(parameter, value):
    """A constant as source; a placeholder as it is; a tuple or list that holds placeholders as a tuple of both."""
    if type(value) is int and parameter in _DTYPES:
        value = type_id_to_type(value)
    if type(value) is int and parameter in WORDS:
        value = WORDS[parameter][value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (tuple, list)):
        entries = tuple(_constant("", entry) for entry in value)
        return _written(entries) if all(isinstance(entry, str) for entry in entries) else entries
    is_literal = value is None or isinstance(value, (bool, int, float, str, Type, DType))
    return literal(value) if is_literal else value


def literal(value):
    """The source of a number, string, None, dtype or `DType` (`ms.float32`), or of a structure of them."""
    if isinstance(value, (tuple, list, dict)):
        return structure_text(value, literal)
    if isinstance(value, (Type, DType)):
        return f"ms.{value}".lower().replace("bool", "bool_")
    if isinstance(value, float) and repr(value) in ("inf", "-inf", "nan"):
        return f'float("{value!r}")'
    return repr(value)


def _written(value, name_of=None):
    return structure_text(value, lambda leaf: leaf if isinstance(leaf, str) else name_of(leaf))


def source_of(name):
    """The `source` of an operator (see `OperatorFacts`); that of a function of ours, if there is one."""
    own = OWN_FUNCTIONS.get(name)
    return facts_of(name).source if own is None else f"{own.__module__}.{own.__name__}"


@cache
def _form(name):
    """The `_Form` of an operator, or None."""
    ready, source = _ready().get(name), source_of(name)
    named = _parsed(source)
    parameters = named if named is not None else _parameters(getattr(auto_generate, ready).__call__) if ready else None
    if source.startswith("."):
        return _Form("", source, parameters)
    if source.startswith("ops."):
        return _Form("from mindspore import ops", source.partition("(")[0], parameters)
    if source and not source.startswith("("):
        module, _, function = source.rpartition(".")
        return _Form(f"from {module} import {function}", function, None)
    if ready:
        defaults = cpp_create_prim_instance_helper.op_args_default_value if ready.endswith("_impl") else {}
        return _Form(f"from {auto_generate.__name__} import {ready}", ready, parameters | defaults.get(name, {}))
    return _constructed(name, named)


def _parsed(source):
    """Parameter -> default, of a source that names them, as "ops.full_like(input, fill_value, dtype=None)"."""
    _, names_them, parameters = source.removesuffix(")").partition("(")
    return _parameters(eval(f"lambda {parameters}: None")) if names_them else None


def _constructed(name, parameters):
    """The `_Form` of an operator that is an instance of a class; `parameters` None: those of the class."""
    public = hasattr(ops, name)
    kind = getattr(ops if public else auto_generate, name, None)
    if not (inspect.isclass(kind) and issubclass(kind, Primitive)):
        return None
    if parameters is None and "__call__" in vars(kind):
        parameters = _parameters(kind.__call__, skipped=1)
    elif parameters is None:
        parameters = dict.fromkeys(getattr(kind(), "input_names", ("input",)), _REQUIRED)
    attributes = _parameters(kind.__init__, skipped=1)
    if public:
        return _Form("from mindspore import ops", f"ops.{name}", parameters, attributes)
    return _Form(f"from {auto_generate.__name__} import {name}", name, parameters, attributes)


@cache
def _ready():
    """Operator -> name of the object in `mindspore.ops.auto_generate` that can be called as it is."""
    objects = vars(gen_ops_prim).items()
    found = {value.name: name for name, value in objects if name.endswith("_op") and isinstance(value, Primitive)}
    for name, value in vars(pyboost_inner_prim).items():
        if name.endswith("_impl"):
            found[type(value).__name__.removeprefix(PYBOOST).removesuffix("Prim")] = name
    return found


@cache
def _parameters(function, skipped=0):
    """Parameter -> default, without the first `skipped`."""
    parameters = list(inspect.signature(function).parameters.values())[skipped:]
    return {parameter.name: parameter.default for parameter in parameters}


def attributes_of(primitive):
    """The arguments of a classic primitive's constructor by name. Some classes keep those of their base instead."""
    names, known = _parameters(type(primitive).__init__, 1), primitive.init_attrs
    return known if known.keys() <= names.keys() else {name: getattr(primitive, name) for name in names}
