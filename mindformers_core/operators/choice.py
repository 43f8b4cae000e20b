"""A choice among the layouts that an operator admits, what is asked, and what follows, as data. Pure Python."""

from dataclasses import dataclass
from functools import cached_property

from mindformers_core.operators.signature import Signature, tensor_meta
from mindformers_core.redistribution import Price


@dataclass(frozen=True)
class Choice:
    """How one operator call is cut: what a plan file stores, and what a search varies.

    Attributes:
        cuts: pairs `(factor, axes)`: the axes that shard it, major to minor, as an entry of `Layout.dims`.
        carried: triples `(axis, inputs, op)`: partial sums that pass through, and the indices of the inputs that bring
            them.
        marked: further axes on which the inputs are marked as varying. Default: none.
    """

    cuts: tuple = ()
    carried: tuple = ()
    marked: frozenset = frozenset()

    @cached_property
    def axes_of(self):
        """`cuts` as a dict."""
        return dict(self.cuts)


@dataclass(frozen=True)
class Resolution:
    """The consequences of a `Choice` for one operator call.

    Attributes:
        inputs: the layout that every tensor input must have.
        outputs: the layout that every output then has.
        algorithm: `(name, axes)` of the distributed algorithm that replaces the operator, and the axes that it spans;
            `(None, ())` where the operator itself runs.
        own: the `Price` of the operator on one rank, with the steps of its algorithm.
        price: the whole `Price`, with the redistributions of inputs and outputs.
    """

    choice: Choice
    inputs: tuple
    outputs: tuple
    algorithm: tuple
    own: Price
    price: Price


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """An operator call whose layouts are to be chosen.

    Attributes:
        name: of the operator.
        metas: a `TensorMeta` with layout for every tensor input.
        mesh: the mesh that all the layouts are on.
        device_model: what redistributions and operators cost.
        dtypes: names of the outputs' dtypes. Default: those of the first input, or float32.
        inputs: for every tensor input the required layout (its varying marks don't count), or None where the layout
            is to be chosen. Default: all are.
        outputs: for every output the layout that it is redistributed to, or None. Default: none is redistributed.
        free: indices of inputs whose redistribution costs nothing, as that of a parameter stored in any layout.
        trained: indices of inputs that a gradient flows back through. Default: all that are differentiable.
        kept: index of an input -> the axes over which it was declared to be cut, and stays cut where the operator
            admits that: axes of the batch for activations, of model parallelism for weights. Default: none.
        algorithm_price: function from this call and a `Resolution`, whose prices aren't known, to the `Price` of the
            steps of its distributed algorithm. Default: they are free.
    """

    name: str
    signature: Signature
    metas: tuple
    mesh: object
    device_model: object
    dtypes: tuple | None = None
    inputs: tuple | None = None
    outputs: tuple | None = None
    free: frozenset = frozenset()
    trained: frozenset | None = None
    kept: tuple = ()
    algorithm_price: object = None

    def __post_init__(self):
        """Give `metas` the required layouts; varying marks remain."""
        given = self.inputs or (None,) * len(self.metas)
        metas = tuple(meta if layout is None else _given(meta, layout) for meta, layout in zip(self.metas, given))
        object.__setattr__(self, "metas", metas)
        if self.trained is None:
            trained = frozenset(index for index, meta in enumerate(metas) if meta.differentiable)
            object.__setattr__(self, "trained", trained)
        if self.dtypes is None:
            dtype = metas[0].dtype if metas else "float32"
            object.__setattr__(self, "dtypes", (dtype,) * len(self.signature.outputs))


def _given(meta, layout):
    """The meta of an input in its required layout; varying marks remain."""
    layout = layout.replace(varying=set(meta.layout.varying) - layout.placed_axes)
    return tensor_meta(meta.shape, meta.dtype, layout, not meta.differentiable)
