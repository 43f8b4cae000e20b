"""What ranks compare before a sharded Cell first computes with inputs of new shapes: these shapes, and the batch.

Ranks whose shapes differ would wait for each other in the first collective; ranks that all read the whole batch, where
each is to read its part, would compute every sample several times, with a loss that looks right.
"""

import logging
from hashlib import blake2b

import numpy as np
from mindspore import Tensor
from mindspore import dtype as mstype

from mindformers_core.communication import communicator, world
from mindformers_core.dtensor.move import dtype_name
from mindformers_core.placement import Replicate, Shard

__all__ = ["check_equal_shapes", "compare_inputs", "suspicious_inputs"]

_LOG = logging.getLogger("mindformers_core")
_BYTES = 4096  # that a rank sends; inputs beyond aren't compared
_VALUES = 2**18  # of a tensor that are compared


def compare_inputs(label, mesh, inputs, placements):
    """Exchange descriptions of the inputs among the ranks of `mesh`, which all call this; an all_gather of 4 KiB.

    Args:
        label: how errors call the Cell.
        mesh: the `DeviceMesh`.
        inputs: pairs (name, this rank's tensor).
        placements: for each input a dict axis -> `Placement`, None where it isn't known.

    Raises:
        ValueError: ranks have tensors of different local shapes or dtypes.
    """
    described = _gathered([_description(name, tensor) for name, tensor in inputs], mesh)
    check_equal_shapes(label, described)
    for warning in suspicious_inputs(label, mesh, described, placements):
        _LOG.warning(warning)


def _description(name, tensor):
    """Name, dtype and shape, a digest of the values, and whether these differ from each other; as text."""
    values = tensor.reshape(-1)[:_VALUES]
    values = (values.astype(mstype.float32) if values.dtype == mstype.bfloat16 else values).asnumpy()
    digest = blake2b(np.ascontiguousarray(values), digest_size=8).hexdigest()
    varied = values.size > 1 and bool((values != values[0]).any())
    return f"{name}\t{dtype_name(tensor.dtype)}{list(tensor.shape)}\t{digest}\t{int(varied)}\n".encode()


def _gathered(lines, mesh):
    """Rank -> `(name, dtype and shape, digest, is varied)` of each of its inputs, as many as fit into the message."""
    message = b""
    for line in lines:
        message += line if len(message) + len(line) <= _BYTES else b""
    axes = tuple(axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1)
    gather = communicator(mesh).make("all_gather", axes, dim=0).collective.forward
    sent = Tensor(np.frombuffer(message.ljust(_BYTES, b"\0"), np.int32).copy())
    messages = gather.uncounted(sent).asnumpy().reshape(mesh.size, -1)
    return {
        rank: [
            (name, shape, digest, varied == "1")
            for name, shape, digest, varied in (
                line.split("\t") for line in text.tobytes().rstrip(b"\0").decode().splitlines()
            )
        ]
        for rank, text in zip(mesh.group(world().rank, axes), messages, strict=True)
    }


def check_equal_shapes(label, described):
    """Raise `ValueError` where ranks have different shapes or dtypes; `described` as of `suspicious_inputs`."""
    shapes = {}
    for rank, inputs in described.items():
        shapes.setdefault(tuple(f"'{name}' {shape}" for name, shape, _, _ in inputs), []).append(rank)
    if len(shapes) > 1:
        said = "; ".join(f"ranks {_shown(ranks)} {', '.join(shape)}" for shape, ranks in shapes.items())
        raise ValueError(
            f"{label} is called with parts of different shapes: {said}: all ranks have to call it alike, so pad or "
            "drop the last batch, or share it out evenly"
        )


def suspicious_inputs(label, mesh, described, placements):
    """Sentences about inputs that are equal on ranks that should have different parts, or the other way round. Pure.

    Args:
        label: how they call the Cell.
        mesh: the `DeviceMesh`.
        described: rank -> `(name, dtype and shape, digest, is varied)` of each input; where all values are the same, as
            of a mask of ones, it isn't varied, and says nothing.
        placements: for each input a dict axis -> `Placement`, None where it isn't known.
    """
    found = []
    names_of = [name for name, *_ in next(iter(described.values()))]
    for axis in mesh.axis_names:
        size = mesh.axis_size(axis)
        groups = {mesh.group(rank, (axis,)) for rank in described} if size > 1 else ()

        def equal(place, groups=groups):
            return all(len({described[rank][place][2] for rank in group}) == 1 for group in groups)

        places = range(len(names_of)) if groups else ()
        varied = [place for place in places if any(inputs[place][3] for inputs in described.values())]
        parts = [place for place in varied if isinstance(placements[place].get(axis), Shard)]
        if parts and all(map(equal, parts)):
            names = ", ".join(f"'{names_of[place]}'" for place in parts)
            found.append(
                f"{label} got the same {names} on all {size} ranks of {axis}, which shards it: every sample is "
                f"computed {size} times; read this rank's part, or give all the whole batch and say so: "
                'shard(…, inputs="full_batch") (check_inputs=False switches this check off)'
            )
        differing = [place for place in places if placements[place].get(axis) == Replicate() and not equal(place)]
        if differing:
            names = ", ".join(f"'{names_of[place]}'" for place in differing)
            found.append(
                f"{label} got different values of {names} on the ranks of {axis}, which does not shard it: they "
                f"compute with different data; give all ranks of {axis} the same, or declare that {axis} shards it "
                "(check_inputs=False switches this check off)"
            )
    return found


def _shown(ranks):
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
