"""Recipes and overrides as text: YAML, with errors that suggest a correct text. Pure Python."""

import re
from collections.abc import Hashable

import yaml

_BY_PATTERN = "swap.op_swap"  # the key of a mapping from patterns, which contain dots
_SCIENTIFIC = re.compile(r"^[-+]?(\d+\.?|\d*\.\d+)[eE][-+]?\d+$")
_STARRED = re.compile(r"""(?<![^\s\[{,:])\*(?:\[\d+\]|[^\s,:'"\[\]{}])*""")  # a text that begins with *, bare


class _RecipeLoader(yaml.SafeLoader):
    """Safe YAML that reads `1e-4` as a number (as YAML 1.2, unlike PyYAML's 1.1), and raises for duplicate keys."""

    def construct_mapping(self, node, deep=False):
        """The dict of `node`; raises `yaml.YAMLError` for a duplicate key."""
        lines = {}
        for entry, _ in node.value:
            key, line = self.construct_object(entry, deep=True), entry.start_mark.line + 1
            if not isinstance(key, Hashable):  # the loader raises the error
                continue
            if key in lines:
                first = f", first in line {lines[key]}" if lines[key] < line else ""
                problem = f"key '{key}' is given twice{first}"
                raise yaml.constructor.ConstructorError(None, None, problem, entry.start_mark)
            lines[key] = line
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node):
        """A whole number, or infinity, which is in no key's range, for more digits than Python reads."""
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
        pattern, setting = key.removeprefix(_BY_PATTERN + "."), ""
        if keys[-1] in ("layers", "backward_prefetch"):
            pattern, _, setting = pattern.rpartition(".")
        if key.startswith(_BY_PATTERN + ".") and ("." in pattern or "*" in pattern):  # dots that divide no keys
            better = f"{{{setting}: {value}}}" if setting else value
            raise ValueError(
                f"override '{text}': a pattern can't be a part of a key: write \"{_BY_PATTERN}={{'{pattern}': "
                f'{better}}}"'
            )
        pairs.append((keys, parse_yaml(value, f"override '{text}'", key)))
    return pairs


def parse_yaml(text, where, key=None):
    """The value of a YAML text, that of an override where its `key` is given.

    Raises:
        ValueError: the text is no YAML; the message begins with `where`.
    """
    try:
        return yaml.load(text, _RecipeLoader)  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        if mark is None:  # characters that YAML doesn't allow
            raise ValueError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from None
        place = f"{where}, line {mark.line + 1}" if "\n" in text else where
        if "alias" in str(error):  # what YAML takes a bare * for
            better = _STARRED.sub(r"'\g<0>'", text.splitlines()[mark.line].strip())
            if key is None:
                raise ValueError(f"{place}: a text that begins with * needs quotes: write {better}") from None
            if not better.startswith(("[", "{")):
                better = f"{{{better}: true}}" if key == _BY_PATTERN else f"[{better}]"
            better = f'a text that begins with * needs quotes of its own: write "{key}={better}"'
            raise ValueError(f"{where}: {better}") from None
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ValueError(f"{place}: not valid YAML: {problem}") from None
