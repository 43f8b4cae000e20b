"""The records of operators and of distributed algorithms: `register_…` enters one, `facts_of` reads it. Pure Python."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from inspect import signature

from mindformers_core.hints import nearest
from mindformers_core.operators.algorithms import ALGORITHMS, Algorithm
from mindformers_core.operators.saved import UNMEASURED, SavedByOperator
from mindformers_core.operators.signature import spelled, tensors_in, whole_signature

FLOWS, ZERO, NO_GRADIENT = "flows", "zero", "none"
_FACTS: dict = {}  # the one registry: operator name -> its `OperatorFacts`
_ALGORITHMS = dict(ALGORITHMS)  # name -> its `Algorithm`


@dataclass(frozen=True)
class OperatorFacts:
    """All that is known of an operator.

    Attributes:
        rule: its rule, see `register_operator`; None for an operator that nobody registered.
        decomposition: a function of its arguments that gives its results by other operators, and is run, or captured,
            in its place.
        gather: whether it has no rule, and gets all its inputs whole; every rank computes the whole results.
        draws: whether it draws random numbers.
        attributes: names of attributes of a classic primitive that the rule, or the decomposition, takes as named
            arguments.
        gradient: `FLOWS`; `ZERO`: a gradient is recorded, and is 0; `NO_GRADIENT`: none is recorded.
        saves: the `SavedByOperator`: the tensors that its gradient saves. Default: `UNMEASURED`.
        view: a function of `operators.views`, or one of its constants, where results are views of the first tensor.
        operations: floating-point operations for an element of its largest tensor; or a function that gives the number
            from the local sizes of all factors of its `Signature`, a dict.
        reads_a_part: whether it reads only as many elements of its inputs as its results have, as an embedding does.
        product: `"x @ w"` or `"x @ w.T"` of its first two arguments, where the gradient of `w` can be deferred.
        source: the call in generated code; default: MindSpore's primitive of the same name. `".name"`: a method of the
            first tensor; `"ops.name(input, dim=0)"`: a function of `mindspore.ops` with its parameters;
            `"(x, dim=0)"`: the primitive, with parameters that it doesn't declare; `"package.module.name"`: a user's
            own function, called with the operator's arguments.
        numbers: places of arguments that are read as numbers where they are constant tensors, such as sizes.
        rewrite: the operator to call instead: its name, or a function of `(name, args, kwargs)` that returns the same
            three.
        writes: whether it changes its first tensor, a Parameter, which therefore stays in the layout that it has.
        algorithms: names of all distributed algorithms that its rule may ask for.
        on_host: whether its results are read, and lie on the host: in an algorithm they are never made again.
    """

    rule: Callable | None = None
    decomposition: Callable | None = None
    gather: bool = False
    draws: bool = False
    attributes: tuple = ()
    gradient: str = FLOWS
    saves: SavedByOperator = UNMEASURED
    view: Callable | str | None = None
    operations: Callable | int = 1
    reads_a_part: bool = False
    product: str = ""
    source: str = ""
    numbers: tuple = ()
    rewrite: Callable | str | None = None
    writes: bool = False
    algorithms: tuple = ()
    on_host: bool = False


def register_operator(*names, **facts):
    """Decorator that makes a function the rule of the operators called `names`.

    With `decomposition` or `gather` there is no rule, and the call alone registers them.

    The rule is called with the operator's own arguments, a `TensorMeta` (global shape and dtype) in the place of
    every tensor, and returns a `Signature`. It raises `ValueError` where shapes or arguments don't fit, before
    anything is computed.

    >>> @register_operator("MyScale", source="my_package.my_scale", saves=NOTHING)
    ... def my_scale(x, factor):
    ...     return elementwise(x)
    >>> register_operator("MySoftmax", decomposition=my_package.softmax_of_parts)
    >>> register_operator("MySort", gather=True)

    Args:
        names: of operators, as MindSpore calls them.
        facts: further attributes of their `OperatorFacts`.

    Raises:
        ValueError: a name that already has a rule, or an algorithm that isn't registered. TypeError: an unknown
            attribute.
    """
    known = [entry.name for entry in fields(OperatorFacts)][1:]
    for key in facts:
        if key not in known:
            raise TypeError(f"register_operator: unknown fact '{key}'{nearest(key, known)}; known: {', '.join(known)}")
    for asked in facts.get("algorithms", ()):
        if asked not in _ALGORITHMS:
            raise ValueError(
                f"the rule of operator '{names[0]}' asks for the distributed algorithm '{asked}'"
                f"{nearest(asked, _ALGORITHMS)}: enter it with register_algorithm first"
            )

    def enter(rule):
        for name in names:
            if name in _FACTS:
                other = _FACTS[name].rule or _FACTS[name].decomposition or all
                raise ValueError(f"operator '{name}' already has a rule, {other.__module__}.{other.__name__}")
            _FACTS[name] = OperatorFacts(rule, **facts)
        return rule

    return enter(None) if facts.get("decomposition") or facts.get("gather") else enter


def register_algorithm(algorithm: Algorithm):
    """Make an `Algorithm` with a `function` known to rules, by its name.

    Raises:
        ValueError: there is one of this name, or it has no function.
    """
    if algorithm.name in _ALGORITHMS or algorithm.function is None:
        raise ValueError(f"a distributed algorithm needs a new name and a function, not {algorithm}")
    _ALGORITHMS[algorithm.name] = algorithm


def algorithm_named(name):
    """The `Algorithm` of a name."""
    return _ALGORITHMS[name]


def registered_operators(fact="rule"):
    """Names of all operators that have a rule, or another attribute of their `OperatorFacts`, sorted."""
    return tuple(sorted(name for name, facts in _FACTS.items() if getattr(facts, fact)))


def facts_of(name):
    """The `OperatorFacts` of an operator; the defaults for an operator that isn't registered."""
    return _FACTS.get(name) or OperatorFacts()


def rewritten(name, args, kwargs):
    """`(name, args, kwargs)` of the call after its operator's `rewrite`; unchanged where there is none."""
    rewrite = facts_of(name).rewrite
    if rewrite is None:
        return name, args, kwargs
    return (rewrite, args, kwargs) if isinstance(rewrite, str) else rewrite(name, args, kwargs)


def rule_attributes(name, attributes):
    """The subset of a primitive's attributes (a dict) that its rule takes as named arguments."""
    return {key: _hashable(attributes[key]) for key in facts_of(name).attributes if key in attributes}


def _hashable(value):
    return tuple(map(_hashable, value)) if isinstance(value, (tuple, list)) else value


@cache
def _parameters(rule):
    """Names of a rule's arguments."""
    return tuple(signature(rule).parameters)


def signature_of(name, args, kwargs=None, shapes=()):
    """The `Signature` of operator `name` called with `args`, where tensors are `TensorMeta`.

    Args:
        name, args, kwargs: the call.
        shapes: of its results, where they are known; an operator that gathers has no rule that tells them.

    Raises:
        ValueError: there is no rule, or the rule rejects the call; names the operator and its arguments.
    """
    rule = facts_of(name).rule
    if facts_of(name).gather:
        return whole_signature(tensors_in([*args, *(kwargs or {}).values()]), shapes)
    if rule is None:
        raise ValueError(
            f"operator '{name}' has no rule, so its layouts are unknown{nearest(name, _FACTS, 0.7)}: with "
            "register_operator of mindformers_core.operators, either replace it by other operators, "
            f"register_operator('{name}', decomposition=function_of_its_arguments), or let every rank compute it of "
            f"whole inputs, register_operator('{name}', gather=True), or write its rule, @register_operator('{name}')"
        )
    try:
        found = rule(*args, **spelled(kwargs or {}, _parameters(rule)))
        undeclared = found.algorithms.difference(facts_of(name).algorithms)
        if undeclared:
            raise ValueError(f"its rule asks for {sorted(undeclared)}, which register_operator's algorithms don't name")
        return found
    except (ValueError, TypeError) as error:
        shown = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in (kwargs or {}).items())])
        raise type(error)(f"operator {name}({shown}): {error}") from error
