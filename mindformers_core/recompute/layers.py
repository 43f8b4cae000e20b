"""Numbers of layers as they are asked for, in one form. Pure Python."""

import re

__all__ = ["LAYERS_FORMS", "common_layers", "layer_numbers"]

LAYERS_FORMS = "true for all layers, a list of layer numbers, as [0, 3], or ranges of them, as '0-7' or '0,3,5-7'"
# five digits: a mistyped end shouldn't make a list that fills the memory
_RANGE = re.compile(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?")


def layer_numbers(given, where):
    """Which layers are meant, by their number in the whole model, from 0.

    Args:
        given: None or False: none; True: all; a text of numbers and ranges, ends included, as "0,3,5-7"; or a list of
            numbers and such texts. Numbers alone are in ascending order: a list in another one is likely to say how
            many layers of each pipeline stage, as in MindSpore Transformers.
        where: the key that it was given for, for errors.

    Returns:
        None, True, or a tuple of ints in ascending order, at least one.

    Raises:
        TypeError, ValueError: anything else, or a layer that is given twice, or too late; begins with `where`.
    """
    if given is None or given is False:
        return None
    if given is True:
        return True
    if not isinstance(given, (str, list, tuple)):
        raise TypeError(f"{where}: {given!r} should be {LAYERS_FORMS}")
    numbers = set()
    for part in [given] if isinstance(given, str) else given:
        for number in _numbers_of(part, where):
            if number in numbers:
                raise ValueError(f"{where}: layer {number} is given twice in {given!r}")
            numbers.add(number)
    if not numbers:
        raise ValueError(f"{where}: {given!r} has no layer in it: give {LAYERS_FORMS}, or leave it out")
    numbers_alone = not isinstance(given, str) and all(type(part) is int for part in given)
    if numbers_alone and list(given) != sorted(given):
        raise ValueError(
            f"{where}: {given!r} should be in ascending order, {sorted(given)}: these are numbers of layers of the "
            "whole model, not how many layers each pipeline stage has"
        )
    return tuple(sorted(numbers))


def _numbers_of(part, where):
    """The numbers of one entry of a list of layers, or of a text."""
    if type(part) is int:
        if part < 0:
            raise ValueError(f"{where}: {part} should be at least 0, the number of the first layer")
        return [part]
    if not isinstance(part, str):
        raise TypeError(f"{where}: {part!r} is no number of a layer: give {LAYERS_FORMS}")
    numbers = []
    for text in part.split(","):
        found = _RANGE.fullmatch(text)
        if not found:
            raise ValueError(f"{where}: {text!r} is neither a layer's number nor a range: give {LAYERS_FORMS}")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f"{where}: range '{text.strip()}' ends before it begins: try '{last}-{first}'")
        numbers.extend(range(first, last + 1))
    return numbers


def common_layers(one, other):
    """What two results of `layer_numbers` both mean: True where both are all layers, else a tuple of numbers."""
    if not one or not other:
        return ()
    if one is True or other is True:
        return one if other is True else other
    return tuple(sorted({*one} & {*other}))
