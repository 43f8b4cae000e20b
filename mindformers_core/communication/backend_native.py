"""The backend of Ascend (HCCL) and GPU (NCCL): MindSpore's own operators.

A process group counts its ranks in ascending order, a `Group` in the order of its axes; where these differ, parts are
reordered locally. MindSpore's operators gather and scatter along dim 0; other dims are moved there and back locally.

What goes from rank to rank goes in a graph by a `NeighborExchange`: it is alike on all ranks, and no order of ranks can
block it. PyNative can't call it and sends messages, which block until they are received. Rows of `dispatch` and
`combine` go in PyNative as many as there are, on Ascend by one operator, and in graphs as parts of one size.
"""

from mindspore import ops
from mindspore.mint import distributed

from mindformers_core.communication import raw
from mindformers_core.communication.local import chunk
from mindformers_core.communication.point_to_point_native import receive_tensor, send_tensor
from mindformers_core.communication.world import world
from mindformers_core.redistribution.steps import receives_first, ring


class NativeCollective(raw.RawCollective):
    """A collective by operators of MindSpore, which has one for `all_to_all` on Ascend only."""

    def __init__(self, group, kind, *arguments):
        super().__init__(group, kind, *arguments)
        self.places = group.places
        self.parts = tuple(group.ranks.index(rank) for rank in sorted(group.ranks))  # the inverse of `places`
        self.whole_ring = arguments  # in a graph, which is alike on all ranks, idle places send as well
        if self.has_idle:
            distance = next(to - place for place, to in enumerate(arguments[0]) if to is not None)
            self.whole_ring = ring(group.size, distance)
        self.by_messages = kind == "permute"
        if kind == "all_to_all" or self.routes:
            self.by_messages = world().device_target != "Ascend"
        if kind in ("all_reduce", "reduce_scatter"):
            make = ops.AllReduce if kind == "all_reduce" else ops.ReduceScatter
            self.operator = make(arguments[-1], group.name)
        elif kind == "all_gather":
            self.operator = ops.AllGather(group.name)
        elif not self.by_messages:
            dim, to_dim = (0, 1) if self.routes else arguments
            self.operator = ops.AlltoAll(group.size, to_dim, dim, group.name)

    def eager(self, x, *sizes):
        if sizes:
            return (self._rows_by_messages if self.by_messages else self._rows_at_once)(x, *sizes[0])
        return getattr(self, f"eager_{self.kind}" if self.by_messages else self.kind)(x, *self.arguments)

    def all_reduce(self, x, op):
        return self.operator(x)

    def all_gather(self, x, dim):
        gathered = self.operator(x)
        if dim == 0:
            return _reordered(gathered, self.places, 0)
        return ops.cat(tuple([chunk(gathered, place, self.size, 0) for place in self.places]), dim)

    def reduce_scatter(self, x, dim, op):
        return self.operator(ops.cat(tuple([chunk(x, part, self.size, dim) for part in self.parts]), 0))

    def all_to_all(self, x, dim, to_dim):
        if not self.by_messages:
            return _reordered(self.operator(_reordered(x, self.parts, to_dim)), self.places, dim)
        sent = tuple([chunk(x, part, self.size, to_dim) for part in self.parts])
        received = self._exchange(sent, list(range(self.size)), list(range(self.size)))
        return ops.cat(tuple([received[place] for place in self.places]), dim)

    def eager_all_to_all(self, x, dim, to_dim):
        parts = [chunk(x, place, self.size, to_dim) for place in range(self.size)]
        return ops.cat(self._traded(parts, [part.shape for part in parts], x.dtype), dim)

    def _rows_at_once(self, x, sent, received):
        """As many rows as there are, by an operator of Ascend; its tensors have a row where they have none."""
        theirs, ours = ([counts[part] for part in self.parts] for counts in (sent, received))
        result = ops.zeros((max(1, sum(received)), *x.shape[1:]), x.dtype)
        distributed.all_to_all_single(result, _in_turn(x, sent, self.parts), ours, theirs, self.group.name)
        found, missing = _in_turn(result, ours, self.places), self.rows_of_result(received) - len(result)
        return ops.cat((found, ops.zeros((missing, *x.shape[1:]), x.dtype)), 0) if missing else found

    def _rows_by_messages(self, x, sent, received):
        """Likewise, where there is none."""
        shapes = [(count, *x.shape[1:]) if count else None for count in received]
        found = self._traded(raw.cut_rows(x, sent), shapes, x.dtype)
        return raw.joined_rows(found, self.rows_of_result(received), x)

    def _traded(self, parts, shapes, dtype):
        """What comes by messages from each place, of these shapes, for the parts that go there; None: nothing."""
        found = list(parts)
        for to, origins in (ring(self.size, distance) for distance in range(1, self.size)):
            to, origin = to[self.index], origins[self.index]
            found[origin] = self._passed(parts[to], to, shapes[origin], dtype, origins)
        return found

    def permute(self, x, destinations, origins):
        to, origin = self.whole_ring[0][self.index], self.whole_ring[1][self.index]
        found = self._exchange((x,), [self.places[to]], [self.places[origin]])[0]
        if not self.has_idle:
            return found
        both = ops.cat((ops.unsqueeze(found, 0), ops.unsqueeze(ops.zeros_like(x), 0)), 0)  # see the backend of CPU
        return ops.reshape(chunk(both, 1 if origins[self.index] is None else 0, 2, 0), x.shape)

    def eager_permute(self, x, destinations, origins):
        to, origin = destinations[self.index], origins[self.index]
        if to == self.index:
            return x
        shape = None if origin is None else x.shape
        found = self._passed(None if to is None else x, to, shape, x.dtype, origins)
        return ops.zeros_like(x) if found is None else found

    def _passed(self, x, to, shape, dtype, origins):
        """What comes by a message while a tensor goes to a place, in the order of `receives_first`.

        Neither is sent where the tensor, or the shape of what comes, is None.
        """

        def receive():
            return None if shape is None else receive_tensor(shape, dtype, self.places[origins[self.index]], name)

        name, is_first = self.group.name, receives_first(origins, self.index)
        received = receive() if is_first else None
        if x is not None:
            send_tensor(x, self.places[to], name)
        return received if is_first else receive()

    def _exchange(self, parts, to, origins):
        """The parts, all of one shape and dtype, of the places `origins` of the process group; `parts` go to `to`."""
        shapes = (parts[0].shape,) * len(parts)
        return ops.NeighborExchange(to, origins, shapes, shapes, parts[0].dtype, self.group.name)(parts)


def _reordered(x, order, dim):
    """`x`, cut along `dim` into as many parts as `order` has entries, joined again in that order of parts."""
    if order == tuple(range(len(order))):
        return x
    return ops.cat(tuple([chunk(x, part, len(order), dim) for part in order]), dim)


def _in_turn(x, counts, order):
    """The rows of places, as many as `counts` says, in another order of places; behind them any."""
    if order == tuple(range(len(order))):
        return x
    parts = raw.cut_rows(x, counts)
    return raw.joined_rows([parts[place] for place in order], x.shape[0], x)
