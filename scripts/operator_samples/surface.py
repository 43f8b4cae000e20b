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
_ABSTRACT = "a base class or container: it computes nothing itself"

# (namespaces, pattern of the whole name) -> reason
EXCLUDED = (
    ("ops", r"(coo|csr|row_tensor|make_(coo|csr|row|sparse)|dense_to_sparse)_.*|coo2csr|csr2coo|coalesce", _SPARSE),
    ("ops", r"(all_(gather|reduce|to_all)|reduce_scatter|scatter_tensor|gather_into).*|barrier|batch_isend_irecv", _COMMUNICATION),
    ("ops", r"broadcast|broadcast_object_list|(gather|scatter|send|recv)_object(_list)?|isend|irecv|send|recv|reduce",
     _COMMUNICATION),
    ("ops", r"recv_object_list|(destroy|init)_process_group|get_(backend|world_size|(global_|group_)?rank)", _COMMUNICATION),
    ("ops", r"get_process_group_ranks|new_group|is_(available|initialized)|set_comm_ops_inplace|all_gather_matmul", _COMMUNICATION),
    ("ops", r"matmul_reduce_scatter|moe_distribute_(combine|dispatch)|distribute|reshard|P2POp", _COMMUNICATION),
    ("ops", r"(tuple|list|dict|string|scalar|bool|env|environ|augassign|ms|shape)_.*|array_(reduce|to_scalar)", _LANGUAGE),
    ("ops", r"make_(dict|list|range|slice|tuple|map_parameter)|is_(_|not|tensor_bool_cond|constant)|isconstant|hastype|is_", _LANGUAGE),
    ("ops", r"is_(dynamic_sequence|sequence)_.*|(not_)?in_dict|switch(_layer)?|geswitch|typeof|zip_operation|kernel|merge",
     _LANGUAGE),
    ("ops", r"iter_converter|J|SliceGetItem|embed|ref_to_embed|reduced_shape|tail|hyper_add|identity|get_vm_impl_fn", _LANGUAGE),
    ("ops", r"broadcast_gradient_args|mixed_precision_cast|tensor_range|depend|partial|dyn_shape|tensor_slice|range", _LANGUAGE),
    ("ops", r"tuple_to_array|shape|dtype|rank|size|numel|is_tensor|is_complex|is_floating_point|is_nonzero|deepcopy|isreal_",
     _SETTING),
    ("ops", r"constexpr|.*_register|add_flags|recompute_block|print_|tensordump|get_grad|move_to|shape_mul", _SETTING),
    ("ops", r"derivative|grad|jacfwd|jacrev|jet|jvp|vjp|vmap|linearize|value_and_grad|cond", _TRANSFORM),
    ("ops", r"scalar_(cast|to_array|to_tensor)|(sparse|nsa|lightning)_.*attention|lightning_indexer|nsa_compress.*|nsa_.*",
     "Ascend only: takes what no other device has"),
    ("mint", r"cdist_|constexpr|equal_ext_op|flatten_ext|jit_.*|softmax_ext|squeeze_impl", _HELPER),
    ("mint.nn.functional", r"adaptive_avg_pool3d_ext|broadcast_to|clamp|elu_ext|hardtanh_op|inplace_.*|norm_ext", _HELPER),
    ("mint.nn.functional", r"silu_func|threshold_op", _HELPER),
    ("mint.special", r"round_op", _HELPER),
    ("mint.nn", r"Cell", _ABSTRACT),
    ("nn", r"Cell(Dict|List)?|SequentialCell|GraphCell|LossBase|Optimizer|TimeDistributed|Identity_", _ABSTRACT),
    ("nn", r"ASGD|Ada.*(?<!Pool[123]d)|Adam.*|FTRL|LARS|Lamb|LazyAdam|Momentum|ProximalAdagrad|RMSProp|Rprop|SGD|.*LR|thor", _WRAPPER),
    ("nn", r"TrainOneStep.*|.*LossScaleUpdateCell|ForwardValueAndGrad|GetNextSingleOp|GradAccumulationCell|With.*Cell|Jvp|Vjp",
     _WRAPPER),
    ("nn", r"MicroBatchInterleaved|OptTFTWrapper|ParameterUpdate|Pipeline.*|DistributedGradReducer|.*Thor|VirtualDataset.*",
     _WRAPPER),
    ("nn", r"SparseTo.*|SparseTensor.*", _SPARSE),
    ("Tensor", r"asnumpy|numpy|tolist|item|itemset|assign_value.*|convert_bytes.*|data_ptr|data_sync|delete_|flush_.*", _DEVICE),
    ("Tensor", r"from_dlpack|from_numpy|to_dlpack|get_bytes|offload.*|move_to|pin_memory|is_(pinned|shared|init|contiguous)",
     _DEVICE),
    ("Tensor", r"storage.*|untyped_storage|stride|set_.*(?<!_)|to_coo|to_csr|param_info|init_data|.*_index_info|wait_pipeline",
     _DEVICE),
    ("Tensor", r"hooks|(register|remove)_hook|requires_grad_|dim|ndimension|numel|nelement|is_(complex|floating_point|signed)",
     _SETTING),
    ("Tensor", r"value|type|to_|getitem.*|setitem.*|set_|share_memory_", _SETTING),
)  # fmt: skip
# helpers of `mint` modules end like this
_INTERNAL = re.compile(r".*(_op|_ext|_impl)$|nllloss")


def exclusion(namespace, name):
    """Why a name of a namespace isn't measured; empty where it is."""
    for space, pattern, reason in EXCLUDED:
        if space == namespace and re.fullmatch(pattern, name):
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
