"""`relayout()`: weights and moments of a running job on another mesh, and checksums that no mesh changes."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindformers_core.checkpoint.checksums import MODULUS, checksum
from mindformers_core.checkpoint.moves import plan_moves
from mindformers_core.checkpoint.parts import divide, on_all_ranks, parts_of_all
from mindformers_core.checkpoint.regions import inside, overlap, shape_of, volume
from mindformers_core.checkpoint.tensors import fill_parameter, model_parts, optimizer_parts, ranks_of, share_weights
from mindformers_core.communication import channel, world
from mindformers_core.communication.tensor_bytes import numpy_dtype
from mindformers_core.grouping import grouped
from mindformers_core.mesh import DeviceMesh

_TENSOR, _READ = (7_020, 0), (7_020, 1)  # tags of messages
_ENDS = "sender", "receiver"


@dataclass(frozen=True)
class RelayoutReport:
    """Bytes that this rank has sent, received, and copied from its own parts of the source."""

    sent: int
    received: int
    copied: int


def relayout(source, target, source_optimizer=None, target_optimizer=None):
    """Give the weights of `source`, a Cell on a mesh, to `target`, the same model on another mesh or with other plans.

    Every rank receives the elements that it lacks, each once, from a rank that holds them: the fewest bytes. At a time
    a rank needs memory for its part of one tensor and for a message of 16 MB beside the two models. All ranks of the
    world call this; the meshes may be of some of them.

    Args:
        source, target: Cells after `shard()`, `hsdp()`, or neither; lists of the Cells of pipeline stages; or `()` on a
            rank outside of that mesh. Build the target under `mindspore.DeviceCtx("meta")`: its values are replaced.
        source_optimizer, target_optimizer: optimizers of these Cells, whose moments move, too.

    Returns:
        The `RelayoutReport` of this rank.

    Raises:
        ValueError: on all ranks: a tensor that the source doesn't have, or with another shape or dtype; experts that
            `moe.placement` has moved.
    """
    held, wanted = _parts(source, source_optimizer), _parts(target, target_optimizer)
    report = move_parts(held, wanted, _ranks())
    share_weights(_cells(target))
    return report


def move_parts(held, wanted, ranks):
    """Give Parameters the values of `Part`s of tensors that other ranks, or other Parameters, hold.

    Args:
        held, wanted: dicts, `Part` -> Parameter: what this rank has, and what it shall have; perhaps the same
            Parameters, which then have other parts of tensors.
        ranks: the `Ranks`, which are all of the world.

    Returns, raises: as `relayout`.
    """
    moves = plan_moves(parts_of_all(ranks, list(held)), parts_of_all(ranks, list(wanted)))
    sources, targets = ({part.key: part for part in parts} for parts in (held, wanted))
    own = [move for move in moves if ranks.rank in (move.sender, move.receiver)]
    by_key = grouped((move.key, move) for move in own)
    left, values, arrays, copied = Counter(map(id, (*held.values(), *wanted.values()))), {}, {}, 0
    for key in sorted({*by_key, *targets, *sources}):
        given, taken = sources.get(key), targets.get(key)
        source, target = held.get(given), wanted.get(taken)
        if source is not None and id(source) not in values:
            values[id(source)] = source.asnumpy()
        if target is not None and id(target) not in arrays:
            arrays[id(target)] = _empty(taken, target)
        value = None if given is None else given.of(values[id(source)])
        array = None if taken is None else taken.of(arrays[id(target)])
        common = None if None in (given, taken) else overlap(given.box, taken.box)
        if common is not None:
            array[inside(common, taken.box)] = value[inside(common, given.box)]
            copied += volume(common) * array.itemsize
        _exchange_tensor(ranks.rank, by_key.get(key, ()), (given, value), (taken, array))
        for each in (parameter for parameter in (source, target) if parameter is not None):
            left[id(each)] -= 1
            if not left[id(each)]:  # nobody reads what it had, and all that it gets has come
                values.pop(id(each), None)
                if id(each) in arrays:
                    fill_parameter(each, arrays.pop(id(each)))
    sent, received = (sum(move.nbytes for move in own if getattr(move, end) == ranks.rank) for end in _ENDS)
    return RelayoutReport(sent, received, copied)


def _empty(part, parameter):
    """An array for the values of a Parameter that `part` is all of, or one of several."""
    return np.empty(shape_of(part.box) if part.view is None else parameter.shape, numpy_dtype(parameter.dtype))


def global_checksums(cells, optimizer=None):
    """A checksum of every *global* tensor, the same on any mesh: a dict, name -> hexadecimal digits, on every rank.

    All ranks of the world call this; arguments as of `relayout`.

    Raises:
        ValueError: on all ranks: two ranks have different values of a part that both hold; names tensor and ranks. Or
            experts that `moe.placement` has moved.
    """
    held, ranks = _parts(cells, optimizer), _ranks()
    divided, own = divide(parts_of_all(ranks, list(held))), []
    for part, parameter in held.items():
        values = parameter.asnumpy()
        for number, (box, _) in enumerate(divided[part.key]):
            if overlap(box, part.box) == box:
                own.append([*part.key, number, checksum(values[inside(box, part.box)], box, part.shape)])
    first, totals = {}, {}
    for rank, found in sorted(ranks.gather(own).items()):
        for group, name, number, value in found:
            known, other = first.setdefault((group, name, number), (value, rank))
            if known != value:
                box, _ = divided[group, name][number]
                where = ", ".join(f"{start}:{stop}" for start, stop in box)
                raise ValueError(f"'{name}'[{where}] differs between rank {other} and rank {rank}, which both hold it")
    for (_, name, _), (value, _) in first.items():
        totals[name] = (totals.get(name, 0) + value) % MODULUS
    return {name: f"{total:016x}" for name, total in sorted(totals.items())}


def _exchange_tensor(rank, moves, given, taken):
    """`exchange` of one tensor, of which this rank holds the `Part` `given[0]` and shall hold `taken[0]`, as arrays."""
    part, array = taken

    def write(move, data):
        array[inside(move.box, part.box)] = data.view(array.dtype).reshape(shape_of(move.box))

    exchange(rank, moves, lambda move: given[1][inside(move.box, given[0].box)], write)


def exchange(rank, moves, read, write):
    """Send and receive the moves of a rank, tensor by tensor: when all of one have been read, so that none wait in
    memory, the next one comes.

    Args:
        rank: this one.
        moves: in an order that all ranks have; those of other ranks are left out.
        read: function of a move, that returns the array to send.
        write: function of a move and of its bytes, which have come.
    """
    own = [move for move in moves if rank in (move.sender, move.receiver)]
    messages = channel() if own else None
    for of_tensor in grouped((move.key, move) for move in own).values():
        for move in of_tensor:
            if move.sender == rank:
                data = np.ascontiguousarray(read(move)).reshape(-1).view(np.uint8)
                messages.send((Tensor.from_numpy(data),), move.receiver, _TENSOR)
            else:
                write(move, messages.receive(move.sender, _TENSOR)[0].asnumpy())
        for move in of_tensor:
            if move.sender == rank:
                messages.receive_object(move.receiver, _READ)
            else:
                messages.send_object("read", move.sender, _READ)


def _cells(given):
    return (given,) if isinstance(given, nn.Cell) else given


def _parts(cells, optimizer):
    """This rank's `Part`s of Cells and an optimizer, a dict, `Part` -> Parameter."""
    rank, cells = world().rank, _cells(cells)
    on_all_ranks(_ranks(), lambda: _check_places(cells))
    return model_parts(cells, rank) | (optimizer_parts(optimizer, rank) if optimizer is not None else {})


def _check_places(cells):
    for path, cell in (pair for net in cells for pair in net.cells_and_names()):
        moved_by = getattr(cell, "moved_by", None)  # of `RoutedExperts`
        if isinstance(moved_by, Parameter) and not moved_by.is_meta and moved_by.asnumpy().any():
            raise ValueError(
                f"relayout() and global_checksums() take experts by their places, but those of '{path}' have moved by "
                "moe.placement: save a checkpoint, which has them by their numbers, and load that"
            )


def _ranks():
    return ranks_of(DeviceMesh((world().size,), ("rank",)), world().rank)
