"""What compiled functions learn from Python, as constants, while MindSpore infers types."""

from mindspore import get_context, ops
from mindspore.ops.primitive import PrimitiveWithInfer

from mindformers_core.mindspore_private import outside_of_meta


class ConstantOfPython(PrimitiveWithInfer):
    """An operator whose result is a constant: while types are inferred, its `__infer__` gives it."""

    def __init__(self):
        super().__init__(type(self).__name__)
        self.set_const_prim(True)
        self.add_prim_attr("constexpr_prim", True)


class _InGraph(ConstantOfPython):
    """Whether it is compiled."""

    def __call__(self):
        return False

    def __infer__(self):
        return {"dtype": None, "shape": None, "value": True}


in_graph = _InGraph()


def has_values(x):
    """Whether the host can read a tensor: in PyNative, unless it has a shape alone."""
    if in_graph():
        return False
    return not x.is_meta


@ops.constexpr
def on_cpu():
    """Whether MindSpore runs on CPU, in a `DeviceCtx("meta")` block, too."""
    with outside_of_meta():
        return get_context("device_target") == "CPU"
