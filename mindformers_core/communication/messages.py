"""Messages of any length among the ranks of a mesh."""

import json
from hashlib import blake2b

import numpy as np
from mindspore import Tensor

from mindformers_core.communication.communicator import communicator
from mindformers_core.communication.world import world
from mindformers_core.grouping import grouped
from mindformers_core.hints import first_of

_SHOWN = 3  # facts in an error
MISSING = "missing"  # in the place of the value of a fact that a rank doesn't have


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


def check_equal(mesh, facts, cure):
    """Raise `ValueError`, on all ranks of a mesh, where they have different facts; all these ranks call this.

    Args:
        mesh: the `DeviceMesh`.
        facts: a dict, name -> value, as of `gather_values`. Ranks exchange a digest, and the facts where it differs.
        cure: what to do, the end of the error.
    """
    digest = blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
    if len({*gather_values(mesh, digest).values()}) > 1:
        said = []
        for name, holders in unlike(gather_values(mesh, facts)).items():
            values = (f"{value} on rank{'s' * (len(ranks) > 1)} {first_of(ranks)}" for value, ranks in holders.items())
            said.append(f"{name} is {' and '.join(values)}")
        raise ValueError(f"{'; '.join(said[:_SHOWN])}{'; …' * (len(said) > _SHOWN)}: {cure}")


def unlike(found):
    """The facts that aren't the same on all ranks: name -> value as text, or `MISSING` -> ranks, ascending. Pure.

    Args:
        found: rank -> dict, name -> value.
    """
    said = {}
    for name in sorted({name for facts in found.values() for name in facts}):
        texts = ((json.dumps(own[name]) if name in own else MISSING, rank) for rank, own in sorted(found.items()))
        said[name] = grouped(texts)
    return {name: holders for name, holders in said.items() if len(holders) > 1}
