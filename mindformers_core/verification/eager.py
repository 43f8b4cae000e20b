"""A verification of a model with Cells that run operator by operator: all ranks against the model's own code."""

import numpy as np
from mindspore import Tensor

from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.communication.world import world
from mindformers_core.operators import TensorMeta
from mindformers_core.passes.thread_tape import ThreadTape, custom_gradients
from mindformers_core.program.structure import tree_fill, tree_leaves, tree_map
from mindformers_core.sharding.declare import copy_cell, eager_cells
from mindformers_core.sharding.initialize import materialize
from mindformers_core.sharding.program import bind_arguments
from mindformers_core.sharding.shard import shard
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.verification.checking import PRECISIONS, Check
from mindformers_core.verification.comparison import largest
from mindformers_core.verification.truth import floating

_LIMITS = 2**-10, 2**-14  # tolerance and rounding: both sides run in float32


def verify_eagerly(net, mesh, config, plan, seed, args, kwargs):
    """The `Check` of one forward and backward pass, of results and gradients of weights; arguments as of `verify`."""
    materialize(net, seed)
    draw, slopes = np.random.default_rng(seed), []

    def slopes_of(results, _):
        slopes.extend(draw.standard_normal(each.shape).astype(np.float32) for each in results)
        return slopes

    given = tree_map(lambda leaf: Tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, (args, kwargs))
    with custom_gradients():
        results, gradients = _differentiated(net, *given, slopes_of)
    true_results, true_gradients = ([each.asnumpy() for each in part] for part in (results, gradients))
    marked = ", ".join(f"'{path}'" for path in eager_cells(net, plan))
    note = f"{marked} and the Cells around have no program: results and gradients of weights were compared with the "
    note += "model's own code, in float32; not verified: tensors inside, an update"
    check = Check(mesh, {}, None, PRECISIONS["float32"], (note,))

    def work(rank):
        cell = shard(copy_cell(net), mesh, config, plan, seed=seed)
        bound, arriving = bind_arguments(tree_of(cell), "", *given)
        parts = (_part(tensor.asnumpy(), layout) for _, tensor, layout in arriving)
        local = tree_fill((bound.args[1:], bound.kwargs), parts, TensorMeta)
        moved = lambda results, layouts: map(_part, slopes, layouts)  # noqa: E731
        results, gradients = _differentiated(cell, *local, moved)
        named = [(path, p.layout) for path, p in cell.parameters_and_names() if p.requires_grad]
        groups = (
            ("result", [(f"number {place}", each.layout) for place, each in enumerate(results)], results, true_results),
            ("gradient", named, gradients, true_gradients),
        )
        for order, (what, places, found, expected) in enumerate(groups):
            scale = largest(expected)
            for (path, layout), tensor, value in zip(places, found, expected, strict=True):
                tensor, at = getattr(tensor, "_local", tensor), (None, (0, 0), None, path, None)
                check.hold((order, check.compared), rank, what, at, layout, tensor, value, scale, limits=_LIMITS)

    with custom_gradients():
        SimulatedRanks(mesh.size).run(work)
    return check


def _differentiated(cell, args, kwargs, slopes_of):
    """The floating results of a Cell, and the gradients of its weights, for slopes of the results and their layouts."""
    tape, found = ThreadTape(), []
    tape.record(lambda *_: found.extend(floating(cell(*args, **kwargs))), floating((args, kwargs)))
    local = [getattr(each, "_local", each) for each in found]
    sens = [Tensor(slope, each.dtype) for slope, each in zip(slopes_of(local, [_layout(each) for each in found]), local)]
    return found, tape.gradients((), local, sens, cell.trainable_params())[1]


def _layout(tensor):
    return getattr(tensor, "layout", None)


def _part(array, layout):
    """This rank's part of a global array."""
    return Tensor(np.ascontiguousarray(array[layout.local_slices(array.shape, world().rank)]))
