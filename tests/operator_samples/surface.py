"""The public functions of MindSpore, enumerated from it, less what isn't an operator: that with a reason."""

import inspect
import re
from functools import cache

from mindspore import ops

from operator_samples.calls import NAMESPACES

__all__ = ["EXCLUDED", "exclusion", "targets"]

_COMMUNICATION = "communication"
_LANGUAGE = "a function of the graph compiler's language: of tuples, scalars, dicts"
_SPARSE = "of sparse tensors (COO, CSR, row), which no layout describes"
_TRANSFORM = "transforms functions, computes nothing itself"
_SETTING = "a setting, decorator or query: no tensor comes out"
_DEVICE = "of memory, devices, storage or files"
_WRAPPER = "a training wrapper, optimizer or learning-rate schedule: it works on the sharded Cell"
_HELPER = "a helper or variant that MindSpore's module imports: it isn't documented under this name"
_ASCEND = "takes what no other device than Ascend has"
_ABSTRACT = "a base class or container: it computes nothing itself"

# namespace -> reason -> patterns of whole names
EXCLUDED = {
    "ops": {
        _SPARSE: "(coo|csr|row_tensor|make_(coo|csr|row|sparse)|dense_to_sparse)_.* coo2csr csr2coo coalesce",
        _COMMUNICATION: """
            (all_(gather|reduce|to_all)|reduce_scatter|scatter_tensor|gather_into).* barrier batch_isend_irecv broadcast
            broadcast_object_list (gather|scatter|send|recv)_object(_list)? isend irecv send recv reduce
            (destroy|init)_process_group get_(backend|world_size|(global_|group_)?rank)
            get_process_group_ranks new_group
            is_(available|initialized) set_comm_ops_inplace matmul_reduce_scatter moe_distribute_(combine|dispatch)
            distribute reshard""",
        _LANGUAGE: """
            (tuple|list|dict|string|scalar|bool|env|environ|augassign|ms|shape)_.* array_(reduce|to_scalar)
            tuple_to_array
            make_(dict|list|range|slice|tuple|map_parameter) is_(|not|tensor_bool_cond) isconstant hastype typeof kernel
            is_(dynamic_sequence|sequence)_.* (not_)?in_dict switch(_layer)? geswitch zip_operation merge iter_converter
            J
            SliceGetItem embed ref_to_embed reduced_shape tail hyper_add identity get_vm_impl_fn depend
            partial dyn_shape
            broadcast_gradient_args mixed_precision_cast tensor_range tensor_slice range""",
        _SETTING: """
            shape dtype rank size numel is_tensor is_complex is_floating_point is_nonzero deepcopy constexpr .*_register
            add_flags recompute_block print_ tensordump get_grad move_to""",
        _TRANSFORM: "derivative grad jacfwd jacrev jet jvp vjp vmap linearize value_and_grad cond",
        _ASCEND: "sparse_.*attention lightning_indexer nsa_.*",
    },
    "mint": {_HELPER: "cdist_ constexpr equal_ext_op flatten_ext jit_.* softmax_ext squeeze_impl"},
    "mint.nn.functional": {
        _HELPER: """
            adaptive_avg_pool3d_ext broadcast_to clamp elu_ext hardtanh_op inplace_.* norm_ext silu_func threshold_op"""
    },
    "mint.nn": {_ABSTRACT: "Cell"},
    "nn": {
        _ABSTRACT: "Cell(Dict|List)? SequentialCell GraphCell LossBase Optimizer TimeDistributed",
        _WRAPPER: """
            ASGD Ada.*(?<!Pool[123]d) Adam.* FTRL LARS Lamb LazyAdam Momentum ProximalAdagrad RMSProp Rprop SGD .*LR
            TrainOneStep.* .*LossScaleUpdateCell ForwardValueAndGrad GetNextSingleOp GradAccumulationCell With.*Cell Jvp
            Vjp MicroBatchInterleaved OptTFTWrapper ParameterUpdate Pipeline.* DistributedGradReducer .*Thor
            VirtualDataset.*""",
        _SPARSE: "SparseTo.* SparseTensor.*",
    },
    "Tensor": {
        _DEVICE: """
            asnumpy numpy tolist item itemset assign_value.* convert_bytes.* data_ptr data_sync delete_ flush_.*
            from_dlpack
            from_numpy to_dlpack get_bytes offload.* move_to pin_memory is_(pinned|shared|init|contiguous) storage.*
            untyped_storage stride set_.*(?<!_) to_coo to_csr to_ param_info init_data .*_index_info wait_pipeline""",
        _SETTING: """
            hooks (register|remove)_hook requires_grad_ dim ndimension numel nelement is_(complex|floating_point|signed)
            value type set_""",
    },
}


def exclusion(namespace, name):
    """Why a name of a namespace isn't measured; empty where it is."""
    for reason, patterns in EXCLUDED.get(namespace, {}).items():
        if any(re.fullmatch(pattern, name) for pattern in patterns.split()):
            return reason
    return ""


def _names(namespace):
    """All public callables of a namespace."""
    module = NAMESPACES[namespace]
    if namespace == "ops":  # functions only: its classes are primitives, and instances of them stand for functions
        found = [name for name in ops.__all__ if not isinstance(getattr(ops, name, None), type)]
    elif namespace in ("nn", "mint.linalg", "mint.special"):
        found = module.__all__
    else:
        found = dir(module)
    for name in sorted({name for name in found if name[0] != "_"}):
        value = getattr(module, name, None)
        if not callable(value) or inspect.ismodule(value):
            continue
        is_cell = isinstance(value, type)
        if namespace in ("nn", "mint.nn"):
            if is_cell and hasattr(value, "construct"):
                yield name
        elif not is_cell:
            yield name


@cache
def targets(namespace):
    """Names of the measured functions of a namespace, sorted."""
    return [name for name in _names(namespace) if not exclusion(namespace, name)]
