"""Verification of one operator: a Cell of it, each dim of each of its tensors cut in turn, on simulated ranks."""

from mindspore import Parameter, Tensor, nn

from mindformers_core import shard, verify
from mindformers_core.communication.world import rank_of
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.operators import tensor_meta
from mindformers_core.tensor_parallel import prepare, programs

__all__ = ["OperatorCell", "cuts", "generated", "verified"]


class OperatorCell(nn.Cell):
    """A function of tensors: floating ones are its Parameters `p0`, `p1`, …, so that gradients are compared."""

    def __init__(self, function, values):
        super().__init__()
        self.function, self.count = function, len(values)
        for place, value in enumerate(values):
            if value.dtype.kind == "f":
                setattr(self, f"p{place}", Parameter(Tensor(value), name=f"p{place}"))

    def construct(self, i0=None, i1=None, i2=None):
        """The result for the tensors that are no Parameters."""
        rest = iter((i0, i1, i2))
        names = [f"p{place}" for place in range(self.count)]
        return self.function(*[getattr(self, name) if hasattr(self, name) else next(rest) for name in names])


def cuts(values, axis="a", size=2):
    """Layouts of all tensors: each dim of each of them is cut over one axis in turn, and nothing is."""
    whole = [layout(*[None] * value.ndim) for value in values]
    yield whole
    for place, value in enumerate(values):
        for dim in range(value.ndim):
            if value.shape[dim] % size == 0:
                one = layout(*[axis if other == dim else None for other in range(value.ndim)])
                yield [*whole[:place], one, *whole[place + 1 :]]


def plan_of(values, layouts):
    """The plan that declares these layouts of an `OperatorCell`."""
    floats = {f"p{n}": each for n, (value, each) in enumerate(zip(values, layouts)) if value.dtype.kind == "f"}
    others = [each for value, each in zip(values, layouts) if value.dtype.kind != "f"]
    others = {f"i{n}": each for n, each in enumerate(others)}
    return {"": {"weight": floats} | ({"input": others} if others else {})}


def verified(function, values, layouts, mesh=None):
    """The `Check` of a function of `values`, arrays, with these layouts; a fault fails."""
    mesh = mesh or DeviceMesh((2,), ("a",))
    others = [Tensor(value) for value in values if value.dtype.kind != "f"]
    check = verify(OperatorCell(function, values), mesh, *others, plan=plan_of(values, layouts))
    assert not check.faults, f"{layouts}\n{check.report()}"
    assert check.compared
    return check


def generated(function, values, layouts):
    """The source of a rank of two, of a function of `values`, arrays, with these layouts: without running it."""
    mesh = DeviceMesh((2,), ("a",))
    others = [(value, each) for value, each in zip(values, layouts) if value.dtype.kind != "f"]
    with rank_of(2, 0):
        net = shard(OperatorCell(function, values), mesh, plan=plan_of(values, layouts))
        parts = [each.bind(mesh, value.ndim).local_shape(value.shape) for value, each in others]
        prepare(net, *(tensor_meta(shape, str(value.dtype)) for shape, (value, _) in zip(parts, others)))
        return programs(net)[-1].source.text
