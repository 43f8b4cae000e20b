"""A verification of a model whose own code is the truth: of Cells that run operator by operator, or have a `bprop`."""

import numpy as np
from mindspore import Tensor

from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.communication.world import rank_of, world
from mindformers_core.hints import first_of
from mindformers_core.operators import TensorMeta
from mindformers_core.padding import stored_array
from mindformers_core.passes.thread_tape import custom_gradients
from mindformers_core.program.structure import tree_fill, tree_map
from mindformers_core.sharding.boundary import bind_arguments
from mindformers_core.sharding.declare import copy_cell, eager_cells
from mindformers_core.sharding.initialize import materialize
from mindformers_core.sharding.parameter_storage import as_computed
from mindformers_core.sharding.replicas import check_result
from mindformers_core.sharding.shard import shard
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.verification.checking import PRECISIONS, Check
from mindformers_core.verification.comparison import close, expected_part, largest
from mindformers_core.verification.truth import differentiated

_LIMITS = 2**-10, 2**-14  # tolerance and rounding: both sides run in the model's dtypes


def own_gradients(net):
    """Paths of the Cells with a `bprop` of their own, which MindSpore's rules of differentiation don't tell."""
    return [path for path, cell in net.cells_and_names() if hasattr(type(cell), "bprop")]


@custom_gradients()
def verify_by_own_code(net, mesh, config, plan, seed, args, kwargs, by_hand):
    """The `Check` of results and gradients of weights; arguments as of `verify`; `by_hand`: paths to mark as eager."""
    materialize(net, seed)
    given = tree_map(lambda leaf: Tensor(leaf) if isinstance(leaf, np.ndarray) else leaf, (args, kwargs))
    expected, truth = _on_one_card(net, given, seed)
    marked = [*eager_cells(net, plan), *by_hand]
    kinds = (marked, "and the Cells around run operator by operator"), (own_gradients(net), "has its own bprop")
    why = "; ".join(f"{first_of(list(map(repr, paths)))} {what}" for paths, what in kinds if paths)
    note = f"{why}: results and gradients of weights were compared {truth}; not verified: tensors inside, gradients of "
    note += "inputs, what the model writes, an update"
    check = Check(mesh, {}, None, PRECISIONS["float32"], (note,))

    def work(rank):
        cell = shard(copy_cell(net), mesh, config, plan, seed=seed)
        for path in by_hand:
            tree_of(cell).mark_eager(path)
        layouts, results, gradients = _own_arrays(cell, *local_inputs(cell, given, rank), seed)
        trained = [(path, p) for path, p in cell.parameters_and_names() if p.requires_grad]
        places = [("result", f"number {place}", layout, ()) for place, layout in enumerate(layouts)]
        places += [("gradient", path, p.layout, getattr(p, "part_sizes", ())) for path, p in trained]
        for number, ((what, path, layout, sizes), array) in enumerate(zip(places, results + gradients, strict=True)):
            order, at = (what == "gradient", check.compared), (None, (0, 0), None, path, None)
            if expected:
                value, scale = expected[number]
                value = stored_array(value, sizes)
                check.hold(order, rank, what, at, layout, Tensor(array), value, scale, limits=_LIMITS)
            elif layout is not None:
                check_result(Tensor(array), layout, f"{what} of '{path}'")

    SimulatedRanks(mesh.size).run(work)
    return check


def _on_one_card(net, given, seed):
    """Pairs (array, scale) of the model's own code, none where it can't run on one card; and what that makes of it."""
    net = copy_cell(net)
    try:
        with rank_of(1, 0):
            again, expected = (
                [(array, largest(group)) for group in _own_arrays(net, *given, seed)[1:] for array in group]
                for _ in range(2)
            )
    except Exception as error:  # code for several ranks, as a collective, or a method that only a DTensor has
        return (), f"among ranks only, as the own code fails on one card: {str(error).strip().partition(chr(10))[0]}"
    if not all(close(one, two, _LIMITS[0], _LIMITS[1] * scale) for (one, _), (two, scale) in zip(again, expected)):
        raise ValueError(
            f"verify() compares ranks of {type(net).__name__} with its own code, which computes something else at its "
            "second call: it draws numbers, or keeps a state; try net.set_train(False)"
        )
    return expected, "with the model's own code, in its dtypes, where a local_map calls its function with whole tensors"


def _own_arrays(cell, args, kwargs, seed):
    """Layouts and arrays of a Cell's floating results, and arrays of its weights' gradients, for random slopes."""
    draw, layouts = np.random.default_rng(seed), []

    def slopes(results):
        layouts.extend(getattr(result, "layout", None) for result in results)
        wholes = (draw.standard_normal(result.shape) for result in results)
        return (expected_part(whole, layout, world().rank) for whole, layout in zip(wholes, layouts))

    groups = differentiated(cell, args, kwargs, slopes, cell.trainable_params())
    return layouts, *([tensor.asnumpy() for tensor in group] for group in groups)


def local_inputs(cell, given, rank):
    """A rank's part of the inputs `given`, `(args, kwargs)`, of a sharded Cell, in the dtypes to compute with."""
    bound, arriving = bind_arguments(tree_of(cell), "", *given)
    parts = (as_computed(Tensor(expected_part(tensor.asnumpy(), layout, rank))) for _, tensor, layout in arriving)
    return tree_fill((bound.args[1:], bound.kwargs), parts, TensorMeta)
