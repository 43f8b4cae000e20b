"""Regular expressions that stand in the place of patterns, as MindSpore Transformers takes them. Pure Python."""

import re

from mindformers_core.recompute.usual_names import WHOLE_NAMES

__all__ = ["as_patterns", "is_expression"]

# what no pattern has; `.*` and `.+` for any characters, `[0-3]` for a digit
_SIGNS = re.compile(r"[\\^$|(){}]|^\.\*\w|\.\+|(^|\.)\[")
_DOT = "\0"  # stands for a dot that is meant, as long as others are for any character
_WRITTEN = (
    (r"^\^|\$$", ""),
    (r"(\\[dw]|\[0-9\]|\[\^\.\])[*+]?", "*"),
    (r"[\[{]([0-9,-]+)[\]}][*+]?", r"\1"),  # [0-3], and {0,1} of a shell
)


_BELOW = rf"(?<=[\w*])((?<!layers){_DOT})?\.[*+]$"  # what is in a Cell is selected with it
_BEGUN = re.compile(rf"^\*(?=({'|'.join(sorted(WHOLE_NAMES))})(\.|$))")  # any characters before a whole name


def is_expression(text):
    """Whether a pattern looks like a regular expression."""
    return bool(_SIGNS.search(text))


def as_patterns(text):
    """What a regular expression would be as patterns: a list of texts; none where that isn't simple, or it is none."""
    if not is_expression(text) or re.search(r"\)[?*+{]", text):
        return []
    found = [_as_pattern(each) for each in _alternatives(text)]
    return [] if any(map(is_expression, found)) else found


def _alternatives(text):
    """`a(b|c)` as `ab` and `ac`."""
    group = re.search(r"\((?:\?:)?([^()]*)\)", text)
    if group is None:
        return text.split("|")
    return [
        each
        for inner in group[1].split("|")
        for each in _alternatives(text[: group.start()] + inner + text[group.end() :])
    ]


def _as_pattern(text):
    any_name = r"\.[*+]" if r"\." in text else r"^\.[*+](?=\w)"  # else dots are likely to be those of a path
    below = _BELOW if r"\." in text or text.startswith((".*", "^")) else r"(?<=\w)\.\+$"
    text = text.replace(r"\.", _DOT)
    for written, meant in (*_WRITTEN, (below, ""), (any_name, "*")):
        text = re.sub(written, meant, text)
    text = _BEGUN.sub("*.", text.replace(".+", ".*").replace(_DOT, "."))
    # MindSpore Transformers' operator in every norm; here these are Cells, of names that end so
    return "*norm" if text == "*.norm" else text
