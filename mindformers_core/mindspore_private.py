"""MindSpore's private names: all that this package uses, under plain ones; no other module has any.

Private is a name that begins with an underscore, in an import path or as an attribute of MindSpore's objects; a module
that is merely undocumented (`graph.api`, `ops.auto_generate`) isn't. `tests/test_private_names.py` holds the package to
that, and asks whether each name exists. All were seen in the version `SEEN_IN`: for another one, look at each use.
"""

# ruff: noqa: F401 (names for other modules)

from contextlib import nullcontext
from operator import attrgetter

import mindspore as ms
from mindspore import Tensor, _c_expression, _Function as Function, amp, nn, ops
from mindspore._c_expression import MixedPrecisionType, NoFallbackGuard, run_backward
from mindspore._c_expression.typing import Type, type_id_to_type
from mindspore.common.generator import default_generator
from mindspore.graph import api, jit_trace
from mindspore.graph._utils.pijit_context import PIJitCaptureContext

SEEN_IN = "2.10.0"

JitExecutor, PyNativeExecutor = api._JitExecutor, api._PyNativeExecutor
pynative_executor, no_grad = api._pynative_executor, api._no_grad
RecurrentLayers = nn.layer.rnns._DynamicRNNBase
PYBOOST, OF_VMAP = "_Pyboost", "_Vmap."  # begin the names of classes of operators' functions, of vectorised functions
# classes of what differentiates or vectorises a function
DIFFERENTIATING = [getattr(ops.composite.base, name) for name in ("_Grad", "_TaylorOperation", "_Vmap")]

# (owner, name) of what is replaced
ALL_FINITE = amp, "_all_finite"
CLIP_BY_GLOBAL_NORM, TOTAL_NORM = ((ops.function.clip_func, name) for name in ("_ClipByGlobalNorm", "_cal_total_norm"))
CROSS_ENTROPY = ops.function.nn_func, "_cross_entropy_for_class_indices"
DRAW = default_generator, "_step"
TRACE_BEGIN, TRACE_END = (jit_trace, "_jit_trace_begin"), (jit_trace, "_jit_trace_end")
SEEDS, GLOBAL_SEED = ms.set_seed.__globals__, "_GLOBAL_SEED"  # a dict, and a key

# of tensors
make_subclass, get_user_data, set_user_data = Tensor._make_subclass, Tensor._get_user_data, Tensor._set_user_data
needs_gradient, grad_node, output_index = map(attrgetter, ("_requires_grad", "_grad_node", "_output_index"))

# of Cells: keys of their `vars`, and attributes
PARAMETER_TABLES, CELLS = ("_params", "_buffers", "_params_list"), "_cells"
CUSTOM_BPROP = "_call_custom_bprop"
BUILT, FLAGS = {"_init_flag": 1}, frozenset(("_mutable_flags", "_func_graph_flags"))
parameters_of, parameter_lists_of = map(attrgetter, ("_params", "_params_list"))
recompute_cell_of, construct_signature = map(attrgetter, ("_recompute_cell", "_construct_sig"))
recompute_in_graphs = nn.Cell._recompute


def leave_dtypes(cell):
    """End the mixed precision of a Cell for compilers."""
    _c_expression.Cell_.set_mixed_precision_type(cell, MixedPrecisionType.NOTSET)


def draw_state():
    """Seed and offset of a draw from the default generator, which moves on, as by MindSpore's operators. Compiles."""
    return default_generator._step(Tensor(12, ms.int64))


def connect_generator(generator=default_generator):
    """Make PyNative and graphs share the seed of a generator.

    MindSpore 2.10 replaces the tensor of the generator's parameter after PyNative has stored the first one: graphs then
    draw from a seed that differs from process to process and that `mindspore.manual_seed` doesn't set. One that is
    compiled before goes on with that.
    """
    state = generator.get_state()
    generator.__init__()
    generator.set_state(state)
    generator._generator.recompute(False)  # a graph would draw anew in the recomputation


def forbid_reuse(cell):
    """Have the compiler copy the graph of a Cell with a `bprop` for every call.

    Where PyNative differentiates the compiled function, all calls of one such graph would get the last call's tensors.
    """
    cell.add_flags(__function_forbid_reuse__=True)


def outside_of_meta():
    """The context of the device around all `DeviceCtx("meta")` blocks."""
    if ms.get_context("device_target") != "meta":
        return nullcontext()
    stack = ms.common.device._DEVICE_STACK.get_stack()
    return ms.DeviceCtx(next(device for device, _ in stack if device != "meta"))
