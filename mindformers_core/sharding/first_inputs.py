"""Comparison of inputs among ranks, before a sharded Cell first computes with new shapes: the shapes, and the batch.

Ranks with different shapes would deadlock in the first collective. Ranks that all read the whole batch, instead of
their parts of it, would compute every sample several times, with a loss that looks right.
"""

import logging
from hashlib import blake2b

import numpy as np

from mindformers_core.capture.open_call import contents_of
from mindformers_core.communication.messages import gather_values
from mindformers_core.dtypes import dtype_name
from mindformers_core.grouping import grouped
from mindformers_core.hints import first_of
from mindformers_core.placement import Replicate, Shard

_LOG = logging.getLogger("mindformers_core")
_VALUES = 2**18  # of a tensor that are compared


def compare_inputs(label, mesh, inputs, placements):
    """Exchange descriptions of the inputs among the ranks of `mesh` by `gather_values`; all ranks call this.

    Args:
        label: how errors call the Cell.
        mesh: the `DeviceMesh`.
        inputs: pairs (name, this rank's tensor).
        placements: for each input a dict axis -> `Placement`, None where it isn't known.

    Raises:
        ValueError: ranks have tensors of different local shapes or dtypes.
    """
    described = gather_values(mesh, [_description(name, tensor) for name, tensor in inputs])
    check_equal_shapes(label, described)
    for warning in suspicious_inputs(label, mesh, described, placements):
        _LOG.warning(warning)


def _description(name, tensor):
    """Name, dtype and shape, a digest of the values, and whether these differ from each other."""
    values = contents_of(tensor.reshape(-1)[:_VALUES])
    digest = blake2b(np.ascontiguousarray(values), digest_size=8).hexdigest()
    varied = values.size > 1 and bool((values != values[0]).any())
    return name, f"{dtype_name(tensor.dtype)}{list(tensor.shape)}", digest, varied


def check_equal_shapes(label, described):
    """Raise `ValueError` where ranks have different shapes or dtypes; `described` as of `suspicious_inputs`."""
    seen = {rank: tuple(f"'{name}' {shape}" for name, shape, *_ in inputs) for rank, inputs in described.items()}
    shapes = grouped((shape, rank) for rank, shape in seen.items())
    if len(shapes) > 1:
        said = (f"ranks {first_of(ranks)} {', '.join(shape)}" for shape, ranks in shapes.items())
        raise ValueError(
            f"{label} is called with parts of different shapes: {'; '.join(said)}: all ranks have to call it alike, so "
            "pad or drop the last batch, or share it out evenly"
        )


def suspicious_inputs(label, mesh, described, placements):
    """Sentences about inputs that are equal on ranks that should have different parts, or the other way round. Pure.

    Args:
        label: how they call the Cell.
        mesh: the `DeviceMesh`.
        described: rank -> `(name, dtype and shape, digest, is varied)` of each input. An input whose values are all the
            same, as a mask of ones, isn't varied, and is ignored where it is sharded.
        placements: for each input a dict axis -> `Placement`, None where it isn't known.
    """
    found, names = [], [f"'{name}'" for name, *_ in next(iter(described.values()))]
    numbers = range(len(names))
    for axis in mesh.axis_names:
        size = mesh.axis_size(axis)
        if size == 1:
            continue
        groups, places = {mesh.group(rank, (axis,)) for rank in described}, [at.get(axis) for at in placements]
        is_equal = [all(len({described[rank][n][2] for rank in group}) == 1 for group in groups) for n in numbers]
        sharded = {  # whose values aren't all the same -> whether ranks have equal ones
            names[n]: is_equal[n]
            for n in numbers
            if isinstance(places[n], Shard) and any(inputs[n][3] for inputs in described.values())
        }
        differing = [names[n] for n in numbers if places[n] == Replicate() and not is_equal[n]]
        if sharded and all(sharded.values()):
            found.append(
                f"{label} got the same {', '.join(sharded)} on all {size} ranks of {axis}, which shards it: every "
                f"sample is computed {size} times; read this rank's part, or give all the whole batch and say so: "
                'shard(…, inputs="full_batch") (check_inputs=False switches this check off)'
            )
        if differing:
            found.append(
                f"{label} got different values of {', '.join(differing)} on the ranks of {axis}, which does not shard "
                f"it: they compute with different data; give all ranks of {axis} the same, or declare that {axis} "
                "shards it (check_inputs=False switches this check off)"
            )
    return found
