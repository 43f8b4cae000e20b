"""Where the boxes of a Parameter lie in the tensors of files: fused, transposed, one for every expert. Pure Python.

A tensor map is a tuple of pairs (pattern of Parameters' paths, `FileTensor`s that together have all of the Parameter);
a path that no pattern matches is the name of a tensor that equals the Parameter.
"""

import re
from dataclasses import dataclass, replace
from itertools import product

from mindformers_core.checkpoint.regions import inside, overlap, shape_of, volume, whole
from mindformers_core.models.spec import EACH, FileTensor


@dataclass(frozen=True)
class View:
    """The values of a box of a file tensor within the array of a rank's part of a Parameter.

    Attributes:
        index: of the array: slices, and numbers for dims that the file tensor doesn't have.
        transposed: whether the last two dims of the file tensor are swapped.
    """

    index: tuple
    transposed: bool = False

    def of(self, array):
        """The values, in the file tensor's order of dims, without a copy: what is written there is in `array`."""
        values = array[self.index]
        return values.swapaxes(-1, -2) if self.transposed else values


def boxes_in_files(tensor_map, path, shape, held):
    """What a rank's box of a Parameter is in files: a list of (name of a tensor, its shape, box of it, `View`).

    Args:
        tensor_map: see above.
        path, shape: of the whole Parameter.
        held: the box of it that the rank has.

    Returns:
        One entry for every box; the `View` is None where a tensor equals the Parameter.

    Raises:
        ValueError: the entry of the map doesn't have every element of the Parameter once.
    """
    letters, tensors = _entry(tensor_map, path)
    if len(tensors) == 1 and tensors[0].is_whole:
        return [(_named(tensors[0].name, letters), tuple(shape), held, None)]
    found, count = [], 0
    for tensor in tensors:
        ways = (range(shape[dim]) if number == EACH else (number,) for dim, number in enumerate(tensor.index))
        for index in product(*ways):
            own = [(number, number + 1) if number is not None else (0, shape[dim]) for dim, number in enumerate(index)]
            own += whole(shape[len(index) :])
            own[tensor.dim] = tensor.rows or own[tensor.dim]
            count += volume(own)
            common = overlap(own, held)
            if common is not None:
                each = [number for number, way in zip(index, tensor.index) if way == EACH]
                found.append((_named(tensor.name, letters, *each), *_in_file(tensor, index, own, common, held)))
    if count != volume(whole(shape)):
        raise ValueError(f"the tensor map has {count} of the {volume(whole(shape))} elements of '{path}'")
    return found


def placed(tensor_map, path, numbers):
    """The entry of a tensor map for the Parameter at `path` with its file tensors `numbers`, one behind the other.

    Raises:
        ValueError: files don't have a tensor for each index of the Parameter's first dim.
    """
    letters, tensors = _entry(tensor_map, path)
    if any(tensor.index[:1] != (EACH,) for tensor in tensors):
        raise ValueError(
            f"experts of '{path}' can't move, since files have them in one tensor: give the model's tensor_map a file "
            "tensor for each, as models/families/decoders.py has it"
        )
    found = (
        replace(tensor, name=_named(tensor.name, letters, number), index=(place, *tensor.index[1:]))
        for tensor in tensors
        for place, number in enumerate(numbers)
    )
    return path, tuple(found)


def _entry(tensor_map, path):
    """What the `*` of a pattern stand for in a path, and the `FileTensor`s of the first entry that matches."""
    found = ((match.groups(), tensors) for pattern, tensors in tensor_map if (match := _matched(pattern, path)))
    return next(found, ((), (FileTensor(path),)))


def _in_file(tensor, index, own, common, held):
    """Shape and box of the file tensor, and the `View`, of the box `common` of a Parameter."""
    first, stop = own[tensor.dim]
    start, rows = tensor.at or (0, stop - first)
    box, shape, places = list(common), list(shape_of(own)), list(inside(common, held))
    box[tensor.dim], shape[tensor.dim] = tuple(end - first + start for end in common[tensor.dim]), rows
    for dim in reversed([dim for dim, number in enumerate(index) if number is not None]):
        places[dim] = places[dim].start
        del box[dim], shape[dim]
    if tensor.transposed:
        box[-2:], shape[-2:] = box[:-3:-1], shape[:-3:-1]
    return tuple(shape), tuple(box), View(tuple(places), tensor.transposed)


def _matched(pattern, path):
    return re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), path)


def _named(name, letters, number=None):
    for each in letters:
        name = name.replace("*", each, 1)
    return name if number is None else name.replace("#", str(number))
