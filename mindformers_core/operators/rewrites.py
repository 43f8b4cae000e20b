"""Operator calls that are better written as calls of another operator. Pure Python.

They are: scalar forms and views that lack a kernel or a gradient on CPU where the plain operator has both; slower forms
of what a newer operator computes; sizes that come one by one (`x.reshape(2, -1)`); arguments in a method's order.
"""


def without_alpha(new_name):
    """`x + alpha * y` where alpha is 1: the general one multiplies first on CPU, and takes twice as long."""

    def rule(name, args, kwargs):
        alpha = args[2] if len(args) > 2 else kwargs.get("alpha", 1)
        if type(alpha) is not int or alpha != 1:
            return name.replace("Scalar", "Ext"), args, kwargs
        return new_name, args[:2], {key: value for key, value in kwargs.items() if key != "alpha"}

    return rule


def sizes_together(new_name):
    """`(x, 2, -1)` as `(x, (2, -1))`."""

    def rule(name, args, kwargs):
        sizes = args[1:] or tuple(kwargs.values())
        if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
            (sizes,) = sizes
        return new_name, (args[0], tuple(sizes)), {}

    return rule


def as_transpose(name, args, kwargs):
    """The dims in another order; without one, reversed."""
    _, (x, order), _ = sizes_together(name)(name, args, kwargs)
    return "Transpose", (x, tuple(range(len(x.shape)))[::-1] if order in ((), (None,)) else order), {}


def as_cast(name, args, kwargs):
    """Without the arguments about copying, which a graph has no use for."""
    return "Cast", (args[0], args[1] if len(args) > 1 else kwargs["dtype"]), {}


def dim_before_indices(name, args, kwargs):
    """`Scatter` instead of `(x, indices, updates, dim, how)`."""
    x, indices, updates, dim, how = args
    return "Scatter", (x, dim, indices, updates, how), kwargs


def condition_first(name, args, kwargs):
    """`x.where(condition, y)` brings its tensor before the condition."""
    first, second, third = (*args, *kwargs.values())
    if "bool" in _dtype_name(first) and name != "DeprecatedWhere":
        return "Select", (first, second, third), {}
    return "Select", (second, first, third), {}


def dim_given(name, args, kwargs):
    """`x.argmax()` as `x.argmax(None)`: without an argument, a graph takes the last dim."""
    return name, args if len(args) > 1 or kwargs else (*args, None), kwargs


def correction_given(name, args, kwargs):
    """`x.var(dim=1)` with its correction, 1: by position, the dim would be that of a method that has another one."""
    given = dict(zip(("dim", "correction", "keepdim"), args[1:])) | kwargs
    return name, (args[0], given.get("dim"), given.get("correction", 1), given.get("keepdim", False)), {}


def float_reduction(new_name):
    """The newer reduction, which takes a third less time; only where both compute in the same dtype."""

    def rule(name, args, kwargs):
        if len(args) < 3 or kwargs or any(args[3:]) or _dtype_name(args[0]) != "float32":
            return name, args, kwargs
        x, dims, keepdim = args[:3]
        return new_name, (x, None if dims in ((), []) else dims, keepdim), {}

    return rule


def masked_fill(name, args, kwargs):
    """The operator takes a third of the method's time, but no integers on CPU, neither as tensors nor as values."""
    if "float" not in _dtype_name(args[0]):
        return name, args, kwargs
    return "MaskedFill", tuple(float(value) if type(value) is int else value for value in args), kwargs


def _dtype_name(tensor):
    return str(getattr(tensor, "dtype", "")).lower()


def slice_one_dim(name, args, kwargs):
    """`x[start:end:step]` along one dim. The masks say that the other dims are whole, whatever their sizes."""
    x, dim, start, end, step = (*args, *kwargs.values(), 1)[:5]
    return _strided(x, dim % len(x.shape), start, end, step, drop=False)


def select_index(name, args, kwargs):
    """One index of a dim, which the result lacks."""
    x, dim, index = (*args, *kwargs.values())
    return _strided(x, dim % len(x.shape), index, index + 1, 1, drop=True)


def split_by_method(name, args, kwargs):
    """The method, whose gradient is right on CPU whatever the pieces' gradients are views of (docs/mindspore.md)."""
    x, size, dim = (*args, *kwargs.values(), 0)[:3]
    if isinstance(size, int) and x.shape[dim] % size:  # as lengths, it keeps nothing for the gradient
        size = tuple(min(size, x.shape[dim] - start) for start in range(0, x.shape[dim], size))
    return "DeprecatedSplit", (x, size, dim), {}


def product_with_a_gradient(name, args, kwargs):
    """Where MindSpore's gradient of a product of local tensors has a dim too many, or fails (docs/mindspore.md)."""
    shapes = [x.layout.local_shape(x.shape) if getattr(x, "layout", None) else x.shape for x in args[:2]]
    if min(map(len, shapes)) > 1 and shapes[0][-1] == 1:
        return "Mul", args, kwargs
    is_one_row = len(shapes[0]) > 2 >= len(shapes[-1]) and set(shapes[0][:-1]) == {1}
    return ("TensorDot", (*args, 1), {}) if is_one_row else (name, args, kwargs)


def _strided(x, dim, start, end, step, drop):
    def along(value, others):
        return tuple(value if place == dim else others for place in range(len(x.shape)))

    others = sum(1 << place for place in range(len(x.shape)) if place != dim)
    begin, end, strides = along(start, 0), along(end, 0), along(step, 1)
    return "StridedSlice", (x, begin, end, strides, others, others, 0, 0, drop << dim), {}


# Those of operators whose own gradient is wrong: eager calls need them, too.
REPAIRS = (split_by_method, product_with_a_gradient)
