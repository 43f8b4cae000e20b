"""The table of operator rules: `register_operator("Name")` enters one, `signature_of` asks it. Pure Python."""

from mindformers_core.hints import nearest

__all__ = ["register_operator", "registered_operators", "rule_attributes", "signature_of"]

_RULES: dict = {}  # the one registry: operator name -> rule
_ATTRIBUTES = {  # what a rule takes as arguments, but the primitive as attributes
    "Sort": ("axis",),
    "Stack": ("axis",),
    "Unstack": ("axis",),
    "Conv2D": ("pad_mode", "pad", "stride", "dilation", "group", "data_format"),
    "MaxPool": ("kernel_size", "strides", "pad_mode", "data_format"),
}


def register_operator(*names):
    """Decorator that makes a function the rule of the operators called `names`.

    The rule is called with the operator's own arguments, a `TensorMeta` (global shape and dtype) in the place of
    every tensor, and returns a `Signature`. It raises `ValueError` where shapes or arguments don't fit, before
    anything is computed.

    >>> @register_operator("MyScale")
    ... def my_scale(x, factor):
    ...     return elementwise(x)

    Raises:
        ValueError: a name that already has a rule.
    """

    def enter(rule):
        for name in names:
            if name in _RULES:
                raise ValueError(
                    f"operator '{name}' already has a rule, {_RULES[name].__module__}.{_RULES[name].__name__}"
                )
            _RULES[name] = rule
        return rule

    return enter


def registered_operators():
    """Names of all operators that have a rule, sorted."""
    return tuple(sorted(_RULES))


def rule_attributes(name, attributes):
    """Those of a primitive's attributes (a dict) that its rule takes as named arguments."""
    return {wanted: attributes[wanted] for wanted in _ATTRIBUTES.get(name, ()) if wanted in attributes}


def signature_of(name, args, kwargs=None):
    """The `Signature` of operator `name` called with `args`, where tensors are `TensorMeta`.

    Raises:
        ValueError: there is no rule, or the rule rejects the call; names the operator and its arguments.
    """
    rule = _RULES.get(name)
    if rule is None:
        raise ValueError(
            f"operator '{name}' has no rule, so its layouts are unknown{nearest(name, _RULES, 0.7)}: register one with "
            f"@register_operator('{name}') (mindformers_core.operators), or run it on local tensors with "
            "local_map(function, …), in a Cell that runs operator by operator: cell.eager() after shard()"
        )
    try:
        return rule(*args, **(kwargs or {}))
    except (ValueError, TypeError) as error:
        shown = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in (kwargs or {}).items())])
        raise type(error)(f"operator {name}({shown}): {error}") from error
