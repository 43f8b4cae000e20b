"""Messages of any length among the ranks of a mesh."""

import json

import numpy as np
from mindspore import Tensor

from mindformers_core.communication.communicator import communicator
from mindformers_core.communication.world import world


def gather_values(mesh, value):
    """The values of all ranks of a mesh, a dict, rank -> value; all these ranks call this.

    Two all-gathers, which `count_collectives` doesn't count: of the lengths, and of the values as JSON.

    Args:
        mesh: the `DeviceMesh`.
        value: of lists, dicts with texts as keys, texts, numbers, bools and None; tuples arrive as lists.
    """
    message, axes = json.dumps(value).encode(), tuple(axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1)
    if not axes:
        return {world().rank: json.loads(message)}
    gather = communicator(mesh).make("all_gather", axes, dim=0).collective.forward
    lengths = gather.uncounted(Tensor(np.array([len(message)], np.int32))).asnumpy()
    words = -(-int(lengths.max()) // 4)
    sent = Tensor(np.frombuffer(message.ljust(words * 4, b" "), np.int32).copy())
    texts = gather.uncounted(sent).asnumpy().reshape(mesh.size, words)
    return {rank: json.loads(text.tobytes()) for rank, text in zip(mesh.group(world().rank, axes), texts, strict=True)}
