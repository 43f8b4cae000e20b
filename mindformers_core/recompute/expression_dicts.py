"""Dicts of regular expressions, as `select_recompute` of MindSpore Transformers has them, as patterns. Pure Python."""

import re

from mindformers_core.recompute.layers import layer_numbers
from mindformers_core.recompute.regular_expressions import as_patterns, is_expression
from mindformers_core.recompute.wording import ranges_shown

__all__ = ["patterns_of"]

_OF_LAYERS = re.compile(r"(\*\.)?\*?(model\.)?layers\.\*\.|\*\.")  # what a pattern begins with, whatever the layer
_FROM_THE_TOP = ("*", ".", "layers.", "model.")


def patterns_of(given):
    """Patterns for a dict of expressions with what they count for: `{".*mlp": ["0-31"]}` is `["layers.0-31.mlp"]`.

    Args:
        given: expression -> True, False or None, or layers in a form that `layer_numbers` takes.

    Returns:
        A list of texts, empty where all is switched off; None where a key or a value can't be told.
    """
    found = []
    for expression, value in given.items():
        try:
            layers = layer_numbers(value, "")
        except (TypeError, ValueError):
            return None
        patterns = _patterns(expression)
        texts = [] if layers is None else [_in_layers(text, layers) for text in patterns]
        if not patterns or None in texts:
            return None
        found += texts
    return list(dict.fromkeys(found))


def _patterns(expression):
    if not isinstance(expression, str) or not re.search(r"\w", expression):
        return []
    return as_patterns(expression) if is_expression(expression) else [expression]


def _in_layers(pattern, layers):
    """A pattern as it is for some layers (True: all); None where it says already which, or isn't about any."""
    if layers is True:
        return pattern if pattern.startswith(_FROM_THE_TOP) else f"*.{pattern}"
    inner = _OF_LAYERS.sub("", pattern, count=1) if _OF_LAYERS.match(pattern) else pattern
    if inner.startswith((".", "layers.", "model.")):
        return None
    return f"layers.{','.join(ranges_shown(layers))}.{inner}"
