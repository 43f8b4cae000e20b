"""`DTensor`: a global tensor of which every rank holds its part; operators on it are single-card operators.

A `DTensor` holds the local tensor (`to_local()`), and the global shape, the dtype and the `Layout` of the whole.
The rule of an operator (`mindformers_core.operators`) gives the layouts that its inputs need and that its outputs
have (see `dispatch.py`). The idea of such a tensor is that of PyTorch's DTensor and of OneFlow's global tensor.
"""

import copy
import math
from operator import attrgetter

from mindspore import Parameter, Tensor, mint, ops

from mindformers_core.algorithms.redistribute import redistribute_local
from mindformers_core.communication import world
from mindformers_core.dtypes import dtype_name
from mindformers_core.layout import Layout, bind_layout
from mindformers_core.lowering.aliases import check_memory, note_adopted, note_write, unwritable
from mindformers_core.lowering.indexing import IndexedTensor, of_whole
from mindformers_core.mindspore_private import make_subclass, pynative_executor
from mindformers_core.operators import tensor_meta
from mindformers_core.padding import narrowed, note_stored, own_slices, padded_shape, stored_shape


class DTensor(IndexedTensor):
    """A tensor on a device mesh. Made by `distribute_tensor`, `DTensor.from_local`, `shard()`, and operators.

    `shape`, `size` and `len()` are the global ones. Its values may be read (`asnumpy()`, `float()`, …) where
    every rank holds the whole tensor; elsewhere that is an error, never a silent gather: ask for `full_tensor()`.
    """

    is_borrowed = False  # whether another tensor has the same values
    _outlives_a_step = False

    @staticmethod
    def from_local(local, layout, mesh=None):
        """The global tensor of which `local` is this rank's part in `layout`.

        Args:
            local: a plain tensor.
            layout: a `Layout`, or a `layout(...)` specification with `mesh`.
            mesh: the mesh to bind the specification to.

        Raises:
            TypeError: `local` is a DTensor already. ValueError: the layout doesn't fit.
        """
        if isinstance(local, DTensor):
            raise TypeError(
                "DTensor.from_local takes a plain tensor; this is a DTensor already: use redistribute(layout)"
            )
        _check_tensor(local, "DTensor.from_local")
        DTensor._intercept()
        bound = bind_layout(layout, mesh, local.ndim, name="local tensor")
        return _wrap_leaf(local, tensor_meta(bound.global_shape(local.shape), dtype_name(local.dtype), bound))

    @property
    def layout(self):
        """The `Layout` of this tensor on its mesh."""
        return self._meta.layout

    @property
    def mesh(self):
        """The `DeviceMesh`."""
        return self._meta.layout.mesh

    @property
    def shape(self):
        """The global shape."""
        return self._meta.shape

    @property
    def size(self):
        """Number of elements of the global tensor."""
        return math.prod(self._meta.shape)

    @property
    def nbytes(self):
        """Bytes of the global tensor."""
        return self.size * self.itemsize

    def numel(self):
        """Number of elements of the global tensor."""
        return self.size

    def to_local(self):
        """This rank's part, a plain tensor through which gradients flow."""
        return self._local

    def redistribute(self, layout, mesh=None):
        """The same global tensor in another layout; the collectives are differentiable.

        The result is cached, so that several consumers in one layout, as the three projections of attention, cost one
        collective forward and one backward. Tensors created outside of a gradient function have no cache: such a
        tensor may live longer than a step, and its cached results would belong to the step before. Nor is the cache
        used inside of `saved_tensors_hooks`: a recomputation must run the same operators as the forward pass.

        Raises:
            ValueError: the layout doesn't fit the tensor, or is on another mesh.
        """
        if isinstance(layout, Layout) and layout.mesh != self.mesh:
            raise ValueError(
                f"redistribute() moves a tensor on its own mesh: this one of shape {self.shape} lives as "
                f"{self.layout!r}, and {layout!r} is on another mesh. "
                "Take it over with distribute_tensor(x.full_tensor(), layout, mesh)"
            )
        target = bind_layout(layout, mesh or self.mesh, self.ndim, self.layout)
        return self if target == self.layout else self._in_layout(target)

    def _in_layout(self, target):
        """As `redistribute`, in a `Layout` on the mesh that is another one."""
        uncached = self._outlives_a_step or pynative_executor.is_saved_tensor_hook_active()
        cache = {} if uncached else vars(self).setdefault("_moved", {})
        key = target, pynative_executor.requires_grad()  # a result made without a gradient has none
        if key not in cache:
            meta = tensor_meta(self.shape, self._meta.dtype, target, self._meta.constant)
            cache[key] = borrowed(wrap(redistribute_local(self._local, self.layout, target, self.shape), meta))
        return cache[key]

    def full_tensor(self):
        """The whole tensor, a plain one, on every rank."""
        return self.redistribute(Layout.on(self.mesh, ((),) * self.ndim))._local

    def _whole(self, what):
        layout = self.layout
        if layout.partial or any(layout.dims):
            raise ValueError(
                f"{what} of a DTensor of shape {self.shape} that lives as {layout!r}: this rank holds only a part. Use "
                ".full_tensor() for the whole, or .to_local() for this rank's part"
            )
        return self._local

    def overwrite(self, value):
        """Give this tensor another value of its shape and dtype, as an operator in place does.

        A Parameter is written where it is, in the layout that it has; any other tensor gets the value's layout.

        Raises:
            ValueError: another tensor would change, too, on one card.
        """
        if not isinstance(value, DTensor):
            value = distribute_tensor(value, Layout.on(self.mesh, ((),) * self.ndim))
        if isinstance(self._local, Parameter):
            if hasattr(self._local, "unwritable"):
                raise ValueError(self._local.unwritable)
            layout = self.layout.replace(varying=())
            ops.assign(self._local, ops.stop_gradient(value.redistribute(layout)._local))
        elif reason := unwritable(self):
            raise ValueError(reason)
        else:
            self._local, self._meta = value._local, value._meta
        vars(self).pop("_moved", None)
        note_write(self, "")

    def lasting(self):
        """What this tensor is, if it outlives the call; else ""."""
        if isinstance(self._local, Parameter):
            return f"Parameter '{self._local.name}'"
        borrowed_from = "an argument of the root Cell, or another tensor in another layout"
        return borrowed_from if self.is_borrowed else ""

    def __deepcopy__(self, memo):
        return wrap(copy.deepcopy(self._local, memo), self._meta)

    def __repr__(self):
        return f"DTensor(shape={self.shape}, dtype={self._meta.dtype}, layout={self.layout!r}, local={self._local})"

    __bool__ = of_whole("bool()", bool)
    __int__ = __index__ = of_whole("int()", int)
    __float__ = of_whole("float()", float)
    __array_ufunc__ = None  # so that a NumPy number on the left leaves the operator to us
    __str__ = __repr__
    __hash__ = Tensor.__hash__


_READ = ("asnumpy", "data_ptr", "get_bytes", "is_contiguous", "item", "storage", "stride", "tolist", "untyped_storage")
DTensor.strides = property(of_whole("strides", attrgetter("strides")))
for _name in _READ:
    setattr(DTensor, _name, of_whole(f"{_name}()"))


def wrap(local, meta):
    """A `DTensor` around a local tensor, without any check."""
    tensor = make_subclass(DTensor, local)
    tensor._local = local
    tensor._meta = meta
    return tensor


def borrowed(tensor):
    """A DTensor, marked as one that can't be changed in place: another tensor has the same values."""
    tensor.is_borrowed = True
    return tensor


def adopted(tensor, mesh):
    """A plain tensor, the same on all ranks, which becomes a DTensor: it is changed in place."""
    check_memory(tensor)
    whole = distribute_tensor(tensor.copy(), Layout.on(mesh, ((),) * tensor.ndim))
    note_adopted(tensor)
    tensor.__class__ = DTensor
    vars(tensor).update(vars(whole))
    return tensor


def _wrap_leaf(local, meta):
    """As `wrap`, for a tensor that may live longer than a step: it has a cache only while a gradient is recorded."""
    tensor = wrap(local, meta)
    tensor._outlives_a_step = not pynative_executor.requires_grad()
    return tensor


def _check_tensor(tensor, what):
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} takes a mindspore.Tensor, not {type(tensor).__name__}")


def distribute_tensor(tensor, layout, mesh=None):
    """Distribute a tensor whose value is equal on all ranks: every rank keeps its part.

    Args:
        tensor: the global tensor, the same on all ranks. For a `Parameter`, the DTensor is backed by a new Parameter
            with this rank's part: `to_local()` is the Parameter for the optimizer.
        layout: a `Layout`, or a `layout(...)` specification with `mesh`.
        mesh: the mesh to bind the specification to.

    Raises:
        ValueError: the layout doesn't fit the shape.
    """
    if isinstance(tensor, DTensor):
        return tensor.redistribute(layout, mesh)
    _check_tensor(tensor, "distribute_tensor")
    DTensor._intercept()
    bound = bind_layout(layout, mesh, tensor.ndim)
    if isinstance(tensor, Parameter):
        return parameter_view(placed_parameter(tensor, bound))
    meta = tensor_meta(tuple(tensor.shape), dtype_name(tensor.dtype), bound)
    return _wrap_leaf(redistribute_local(tensor, Layout.on(bound.mesh, ((),) * tensor.ndim), bound), meta)


def placed_parameter(parameter, layout, global_shape=None):
    """A `Parameter` of the same name that holds this rank's part only, with `.layout` and `.global_shape`.

    The result is a new object where the shape changes: MindSpore's autograd stores a Parameter's shape at its creation.

    Args:
        parameter: holds the whole value; or the part already, where `global_shape` says so.
        layout: the `Layout`; no partial and no varying ones.
        global_shape: shape of the whole, where `parameter` holds a part.
    """
    if layout.partial or layout.varying:
        raise ValueError(f"parameter '{parameter.name}': a parameter is sharded or replicated, not {layout}")
    shape = tuple(parameter.shape) if global_shape is None else global_shape
    if any(layout.dims):
        sizes = getattr(parameter, "part_sizes", ())
        local, part = layout.local_shape(padded_shape(shape, sizes), f"parameter '{parameter.name}'"), parameter
        if global_shape is None:
            slices = layout.local_slices(padded_shape(shape, sizes), world().rank)
            part = _padded(parameter.value(), own_slices(slices, sizes), local) if sizes else parameter.value()[slices]
        placed = Parameter(part, name=parameter.name, requires_grad=parameter.requires_grad)
        vars(placed).update({name: value for name, value in vars(parameter).items() if name not in vars(placed)})
        parameter = placed
    parameter.layout = layout
    parameter.global_shape = shape
    return parameter


def _padded(tensor, own, shape):
    """The slices `own` of a tensor, with zeros behind their ends, up to a shape."""
    if any(each.start == each.stop for each in own):
        return mint.zeros(shape, dtype=tensor.dtype)
    tensor = tensor[own]
    for dim, (size, room) in enumerate(zip(tensor.shape, shape)):
        if size != room:
            zeros = mint.zeros((*tensor.shape[:dim], room - size, *tensor.shape[dim + 1 :]), dtype=tensor.dtype)
            tensor = ops.cat((tensor, zeros), dim)
    return tensor


def parameter_view(parameter, make=_wrap_leaf):
    """The DTensor of a placed `Parameter`, for operators; gradients flow to the parameter.

    `make(local, meta)` makes it; see `with_padding` for what it has besides where it is padded.
    """
    stored = make(parameter, parameter_meta(parameter))
    if not hasattr(parameter, "part_sizes"):
        return stored
    view = narrowed(stored, parameter.part_sizes, ops)
    note_stored(view, stored, parameter.part_sizes)
    return view


def parameter_meta(parameter):
    """The `TensorMeta` of a placed `Parameter`, as it computes: it may be stored in another layout."""
    constant = not parameter.requires_grad
    layout = getattr(parameter, "computing_layout", parameter.layout)
    return tensor_meta(stored_shape(parameter), dtype_name(parameter.dtype), layout, constant)
