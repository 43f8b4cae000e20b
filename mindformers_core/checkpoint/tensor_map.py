"""Where the boxes of a Parameter lie in the tensors of files: fused, transposed, one for every expert. Pure Python.

A tensor map is a tuple of pairs (pattern of Parameters' paths, `FileTensor`s that together have all of the Parameter);
a path that no pattern matches is the name of a tensor that equals the Parameter.
"""

import re
from dataclasses import dataclass

from mindformers_core.checkpoint.regions import inside, overlap, shape_of, volume, whole


@dataclass(frozen=True)
class View:
    """The values of a box of a file tensor within the array of a rank's part of a Parameter.

    Attributes:
        index: slices of the array.
        each: whether the first dim, of size 1, isn't one of the file tensor.
        transposed: whether the last two dims of the file tensor are swapped.
    """

    index: tuple
    each: bool = False
    transposed: bool = False

    def of(self, array):
        """The values, in the file tensor's order of dims, without a copy: what is written there is in `array`."""
        values = array[self.index]
        values = values[0] if self.each else values
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
    letters, tensors = next(
        ((match.groups(), found) for pattern, found in tensor_map if (match := _matched(pattern, path))), ((), ())
    )
    if not tensors:
        return [(path, tuple(shape), held, None)]
    if len(tensors) == 1 and tensors[0].is_whole:
        return [(_named(tensors[0].name, letters), tuple(shape), held, None)]
    found, count = [], 0
    for tensor in tensors:
        for number in range(shape[0]) if tensor.each else (None,):
            own = list(whole(shape))
            own[tensor.dim] = tensor.rows or own[tensor.dim]
            if number is not None:
                own[0] = (number, number + 1)
            count += volume(own)
            common = overlap(own, held)
            if common is not None:
                found.append((_named(tensor.name, letters, number), *_in_file(tensor, own, common, held)))
    if count != volume(whole(shape)):
        raise ValueError(f"the tensor map has {count} of the {volume(whole(shape))} elements of '{path}'")
    return found


def _in_file(tensor, own, common, held):
    """Shape and box of the file tensor, and the `View`, of the box `common` of a Parameter."""
    first, stop = own[tensor.dim]
    start, rows = tensor.at or (0, stop - first)
    box, shape = list(common), list(shape_of(own))
    box[tensor.dim], shape[tensor.dim] = tuple(end - first + start for end in common[tensor.dim]), rows
    box, shape = box[int(tensor.each) :], shape[int(tensor.each) :]
    if tensor.transposed:
        box[-2:], shape[-2:] = box[:-3:-1], shape[:-3:-1]
    return tuple(shape), tuple(box), View(inside(common, held), tensor.each, tensor.transposed)


def _matched(pattern, path):
    return re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), path)


def _named(name, letters, number=None):
    for each in letters:
        name = name.replace("*", each, 1)
    return name.replace("#", str(number))
