"""`ops.shard()`: a Cell or a function runs in parallel inside a program that is data parallel in PyNative.

After MindSpore's functional sharding (`ops.shard`, `Cell.shard`), which compiles the part. Here it has a program of its
own, as every sharded Cell, in PyNative and under `jit`.
"""

from dataclasses import dataclass
from inspect import Parameter, Signature, getclosurevars
from itertools import zip_longest

import mindspore as ms
from mindspore import nn

from mindformers_core.algorithms.compiled import in_graph
from mindformers_core.communication import world
from mindformers_core.dtensor.dtensor import DTensor
from mindformers_core.hints import nearest
from mindformers_core.layout import LayoutSpec
from mindformers_core.program.structure import call_signature, tree_map
from mindformers_core.propagation.strategies import layouts_of, mesh_of
from mindformers_core.sharding.shard import FULL_BATCH, ShardConfig, shard as shard_cell

DATA_PARALLEL = "data_parallel"


@dataclass(frozen=True, repr=False)
class _Samples(LayoutSpec):
    """Dim 0 over all axes of the mesh, as data parallelism cuts it; a scalar is whole."""

    def _dims(self, mesh, ndim, arriving):
        return super()._dims(mesh, ndim, arriving) if ndim else []


def shard(
    fn, in_strategy, out_strategy=None, device=None, level=0, *, parameter_plan=None, mesh=None,
    dataset_strategy=DATA_PARALLEL,
):  # fmt: skip
    """The function that computes `fn` in parallel over all ranks; what is around it stays as it is.

    A tensor outside has this rank's samples: dim 0 of a global tensor is cut over all ranks. `fn` gets the global
    tensors in the layouts of `in_strategy`, and its results are this rank's samples again. So gradients of Parameters
    that `fn` uses, or gets whole, are those of the *sum* of all ranks' losses, reduced already: let a rank's loss be
    the sum over its samples, divided by the number of all. Other Parameters' gradients are this rank's, to be summed.

    Args:
        fn: a Cell, whose Parameters are placed, as by `mindformers_core.shard`; or a function of tensors. Cells that a
            function closes over, by their own names, are sharded; a Parameter is to be an argument.
        in_strategy: a tuple, for every argument a strategy (into how many parts each dim is cut), a layout, or None:
            as it comes. A strategy takes the mesh axes that an argument before it has for the same number, else the
            first ones that are left.
        out_strategy: such a tuple, for every result; None: its samples. A rank gets its part in this layout. Default:
            each rank's samples of all results, scalars whole.
        device: the device of this process, which is the default.
        level: 0, 1 or 2, modes of MindSpore's search: here one propagation does all.
        parameter_plan: path of a Parameter of the Cell -> its strategy or layout. Default: whole, or as hooks say.
        mesh: a `DeviceMesh` of all ranks. Default: that of the layouts given, or one with an axis for every prime
            factor of the number of ranks, in the order of the first strategies.
        dataset_strategy: how tensors come: `"data_parallel"`; `"full_batch"`: whole, alike on all ranks, and then
            results are whole, too; or a tuple, for every argument a strategy, a layout, or None for its samples: a
            Parameter that is passed as an argument of two dims is whole, `(1, 1)`.

    Returns:
        A function of local tensors, for PyNative and `mindformers_core.jit`. Its `cell` is sharded: `explain` takes it.

    Raises:
        TypeError, ValueError: something else than a Cell or function, or a method of a Cell; a strategy or layout that
            doesn't fit; another device. Later: dim 0 of a result that the ranks don't divide.
    """
    _check(fn, in_strategy, out_strategy, device, level, parameter_plan, dataset_strategy)
    is_whole, names = dataset_strategy == FULL_BATCH, _names(fn, len(in_strategy))
    coming = () if isinstance(dataset_strategy, str) else tuple(dataset_strategy)
    parts = {"in_strategy": in_strategy, "out_strategy": out_strategy or (), "dataset_strategy": coming}
    parts["parameter_plan"] = tuple((parameter_plan or {}).values())
    mesh = mesh_of(parts, world().size) if mesh is None else mesh
    inputs, outputs, coming, weights = layouts_of(parts, mesh)
    samples = LayoutSpec(()) if is_whole else _Samples((tuple(mesh.axis_names),))
    outputs = tuple(samples if each is None else each for each in outputs)
    plan = {"": {"input": dict(zip(names, inputs)), "output": outputs or samples}}
    for path, each in zip(parameter_plan or {}, weights):
        owner, _, name = f"fn.{path.removeprefix('self.')}".rpartition(".")
        plan.setdefault(owner, {"weight": {}})["weight"][name] = each
    coming = {name: each or samples for name, each in zip_longest(names, coming[: len(names)])}
    part = _root(fn, names, is_nested=out_strategy is None)
    shard_cell(part, mesh, ShardConfig(), plan, inputs=FULL_BATCH if is_whole else coming)

    def function(*args, **kwargs):
        results = part(*args, **kwargs)
        if out_strategy is None:
            results = results[0]
        return results if in_graph() else tree_map(_local, results)

    function.cell = part
    return function


def _root(fn, names, is_nested):
    """A Cell that calls `fn`, with the Cells that it closes over; `is_nested`: it returns a tuple of one."""

    def construct(self, *args):
        return (self.fn(*args),) if is_nested else self.fn(*args)

    entries = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", *names)]
    construct.__signature__ = Signature(entries)
    part = type("ShardedPart", (nn.Cell,), {"construct": construct})(auto_prefix=False)  # Parameters keep their names
    part.fn = fn
    used = {} if isinstance(fn, nn.Cell) else getclosurevars(fn)
    for name, value in {**used.globals, **used.nonlocals}.items() if used else ():
        if isinstance(value, nn.Cell):
            if name == "self":
                raise ValueError(
                    f"shard(): function {fn.__name__} closes over 'self', a {type(value).__name__}, all of which would "
                    "be sharded: give it what it uses, as block = self.block"
                )
            setattr(part, name, value)
    return part


def _names(fn, count):
    """Names of the arguments of `fn`, the first `count` of which have a strategy."""
    signature = call_signature(type(fn).construct if isinstance(fn, nn.Cell) else fn)
    entries = list(signature.parameters.values())[isinstance(fn, nn.Cell) :]
    if any(each.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for each in entries):
        return [f"argument_{place}" for place in range(count)]
    if count > len(entries):
        names = ", ".join(each.name for each in entries) or "none"
        raise ValueError(f"shard(): in_strategy has {count} entries, and the arguments are {names}")
    return [each.name for each in entries]


def _local(leaf):
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def _check(fn, in_strategy, out_strategy, device, level, parameter_plan, dataset_strategy):
    """Raise what `shard` raises of its arguments."""
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"shard() takes a Cell or a function, not {fn!r}")
    if isinstance(getattr(fn, "__self__", None), nn.Cell):
        raise TypeError(
            f"shard() takes a Cell or a function, not {fn.__name__}, a method of a {type(fn.__self__).__name__}: give "
            "the Cell, or a function that calls what the method uses"
        )
    for name, given in {"in_strategy": in_strategy, "out_strategy": out_strategy or ()}.items():
        if not isinstance(given, (tuple, list)):
            raise TypeError(f"shard({name}={given!r}): write a tuple with a strategy, a layout or None for each")
    if isinstance(dataset_strategy, str) and dataset_strategy not in (known := (DATA_PARALLEL, FULL_BATCH)):
        hint = nearest(dataset_strategy, known)
        raise ValueError(f"shard(dataset_strategy={dataset_strategy!r}): choose one of {', '.join(known)}{hint}")
    target = ms.get_context("device_target")
    if device not in (None, target):
        raise ValueError(f"shard(device={device!r}): this process computes on {target}{nearest(str(device), [target])}")
    if level not in (0, 1, 2):
        raise ValueError(f"shard(level={level!r}): choose one of 0, 1, 2, which compute alike")
    if parameter_plan and not isinstance(fn, nn.Cell):
        raise TypeError("shard(parameter_plan=…): a function has no Parameters: give a Cell, or pass them as arguments")
