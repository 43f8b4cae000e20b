"""Recipes and overrides as text: YAML, with errors that say what to write instead. Pure Python."""

import re
from collections.abc import Hashable

import yaml

__all__ = ["parse_overrides", "parse_yaml"]

_BY_PATTERN = ("swap", "op_swap")  # the key whose value is a mapping of patterns, which have dots of their own
_OF_A_PATTERN = ("layers", "backward_prefetch")
_SCIENTIFIC = re.compile(r"^[-+]?(\d+\.?|\d*\.\d+)[eE][-+]?\d+$")
_STARRED = re.compile(r"""(?<![^\s\[{,:])\*(?:\[\d+\]|[^\s,:'"\[\]{}])*""")  # a text that begins with *, bare


class _RecipeLoader(yaml.SafeLoader):
    """Safe YAML, with `1e-4` read as a number (YAML 1.2, but not PyYAML's 1.1) and with keys given twice refused."""

    def construct_mapping(self, node, deep=False):
        """The dict of `node`; raises `yaml.YAMLError` for a key that is there twice."""
        lines = {}
        for entry, _ in node.value:
            key, line = self.construct_object(entry, deep=True), entry.start_mark.line + 1
            if not isinstance(key, Hashable):  # the loader itself says so
                continue
            if key in lines:
                first = f", first in line {lines[key]}" if lines[key] < line else ""
                problem = f"key '{key}' is given twice{first}"
                raise yaml.constructor.ConstructorError(None, None, problem, entry.start_mark)
            lines[key] = line
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node):
        """A whole number; one with more digits than Python reads is infinite, which is in no key's range."""
        try:
            return super().construct_yaml_int(node)
        except ValueError:
            return float("-inf" if node.value.startswith("-") else "inf")


_RecipeLoader.add_constructor("tag:yaml.org,2002:int", _RecipeLoader.construct_yaml_int)
_RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+.0123456789"))


def parse_overrides(overrides):
    """`["a.b=1"]` -> `[(("a", "b"), 1)]`; raises `ValueError` for a text of another form."""
    pairs = []
    for text in overrides:
        key, equals, value = text.partition("=")
        keys = tuple(key.split("."))
        if not equals or not all(keys):
            raise ValueError(f"'{text}' is no override: write section.key=value, as training.steps=10")
        _check_no_pattern(text, keys, value)
        pairs.append((keys, _parse_override(text, key, value)))
    return pairs


def _check_no_pattern(text, keys, value):
    """Raise `ValueError` where a key goes on with a pattern, whose dots are not those of keys."""
    inside = keys[2:]
    has_setting = inside[-1:] and inside[-1] in _OF_A_PATTERN
    pattern = ".".join(inside[:-1] if has_setting else inside)
    if keys[:2] == _BY_PATTERN and ("." in pattern or "*" in pattern):
        better = f"{{{inside[-1]}: {value}}}" if has_setting else value
        raise ValueError(
            f"override '{text}': a pattern can't be a part of a key: write \"swap.op_swap={{'{pattern}': {better}}}\""
        )


def _parse_override(text, key, value):
    try:
        return parse_yaml(value, f"override '{text}'")
    except _Starred:
        better = _with_quotes(value)
        if not better.startswith(("[", "{")):
            better = f"{{{better}: true}}" if key == ".".join(_BY_PATTERN) else f"[{better}]"
        raise ValueError(
            f"override '{text}': a text that begins with * needs quotes of its own: write \"{key}={better}\""
        ) from None


class _Starred(ValueError):
    """A text that begins with * and has no quotes: an alias, to YAML."""


def parse_yaml(text, where):
    """What a YAML text says; raises `ValueError`, which begins with `where`, for what is no YAML."""
    try:
        return yaml.load(text, _RecipeLoader)  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark is None:  # characters that YAML doesn't allow
            raise ValueError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from None
        place = f"{where}, line {mark.line + 1}" if "\n" in text else where
        if "alias" in str(error):
            line = _with_quotes(text.splitlines()[mark.line].strip())
            raise _Starred(f"{place}: a text that begins with * needs quotes: write {line}") from None
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ValueError(f"{place}: not valid YAML: {problem}") from None


def _with_quotes(line):
    """A line of YAML, or a value, with quotes around what begins with *."""
    return _STARRED.sub(lambda found: f"'{found[0]}'", line)
