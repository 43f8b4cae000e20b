"""A verification of a model with Cells that run operator by operator: all ranks against the model's own code."""

import numpy as np
from mindspore import Tensor

from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.communication.world import world
from mindformers_core.operators import TensorMeta
from mindformers_core.passes.thread_tape import ThreadTape, custom_gradients
from mindformers_core.program.structure import tree_fill, tree_map
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
    given = tree_map(lambda leaf: Tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, (args, kwargs))
    expected = [(array, largest(group)) for group in _differentiated(net, *given, [], seed) for array in group]
    marked = ", ".join(f"'{path}'" for path in eager_cells(net, plan))
    note = f"{marked} and the Cells around have no program: results and gradients of weights were compared with the "
    note += "model's own code, in float32; not verified: tensors inside, an update"
    check = Check(mesh, {}, None, PRECISIONS["float32"], (note,))

    def work(rank):
        cell, layouts = shard(copy_cell(net), mesh, config, plan, seed=seed), []
        bound, arriving = bind_arguments(tree_of(cell), "", *given)
        parts = (Tensor(_part(tensor.asnumpy(), layout)) for _, tensor, layout in arriving)
        local = tree_fill((bound.args[1:], bound.kwargs), parts, TensorMeta)
        results, gradients = _differentiated(cell, *local, layouts, seed)
        places = [("result", f"number {place}", layout) for place, layout in enumerate(layouts)]
        places += [("gradient", path, p.layout) for path, p in cell.parameters_and_names() if p.requires_grad]
        for (what, path, layout), array, (value, scale) in zip(places, results + gradients, expected, strict=True):
            order, at = (what == "gradient", check.compared), (None, (0, 0), None, path, None)
            check.hold(order, rank, what, at, layout, Tensor(array), value, scale, limits=_LIMITS)

    SimulatedRanks(mesh.size).run(work)
    return check


def _differentiated(cell, args, kwargs, layouts, seed):
    """Arrays of a Cell's floating results and of its weights' gradients, for random slopes; fills in `layouts`."""
    tape, results, draw = ThreadTape(), [], np.random.default_rng(seed)
    with custom_gradients():
        tape.record(lambda *_: results.extend(floating(cell(*args, **kwargs))), floating((args, kwargs)))
        local = [getattr(result, "_local", result) for result in results]
        layouts.extend(getattr(result, "layout", None) for result in results)
        slopes = (_part(draw.standard_normal(each.shape), layout) for each, layout in zip(results, layouts))
        sens = [Tensor(slope, each.dtype) for slope, each in zip(slopes, local)]
        _, gradients = tape.gradients((), local, sens, cell.trainable_params())
    return [each.asnumpy() for each in local], [each.asnumpy() for each in gradients]


def _part(array, layout):
    """This rank's part of a global array; all of it without a layout."""
    return array if layout is None else np.ascontiguousarray(array[layout.local_slices(array.shape, world().rank)])
