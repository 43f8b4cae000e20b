"""Linear layers that multiply numbers rounded to float8: a layer's policy, and the rounding, simulated.

Micikevicius et al., "FP8 formats for deep learning" (2022). Every tensor is scaled by its largest number at the time
("current scaling"), to a power of two, so that rounding is the same on any mesh.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindformers_core.algorithms.custom import custom_operator
from mindformers_core.communication.world import process_state
from mindformers_core.hints import nearest
from mindformers_core.layout import Layout
from mindformers_core.lazy_exports import import_object
from mindformers_core.mindspore_private import outside_of_meta
from mindformers_core.operators import Algorithm, elementwise, equation, register_algorithm, register_operator
from mindformers_core.operators.registry import NO_GRADIENT
from mindformers_core.operators.saved import NOTHING
from mindformers_core.scopes import entered

FORMATS = {"e4m3": (3, -6, 8), "e5m2": (2, -14, 15)}  # bits of the mantissa, least and greatest exponent
_LEAST = -100  # exponent of the least tensors that are scaled


class _Rounding(nn.Cell):
    """A tensor at the numbers of a format, ties to even, in float32; `largest` is its largest absolute value.

    The largest number of both formats has the mantissa 1.75: tensors are scaled so that theirs has at most that.
    """

    def __init__(self, bits, low, high):
        super().__init__(auto_prefix=False)
        powers = 2.0 ** np.arange(low, high + 1)
        self.limits = Tensor(1.75 * 2.0 ** np.arange(_LEAST, 128), ms.float32)
        self.scales = Tensor([*2.0 ** (high - np.arange(_LEAST, 128.0)), np.nan], ms.float32)  # NaN: of infinity
        self.borders, self.spacings = Tensor(powers[1:], ms.float32), Tensor(powers * 2.0**-bits, ms.float32)

    def construct(self, x, largest):
        largest = ops.reshape(ops.cast(largest, ms.float32), (1,))
        scale = ops.gather(self.scales, ops.searchsorted(self.limits, largest), 0)
        scaled = ops.cast(x, ms.float32) * scale
        spacing = ops.gather(self.spacings, ops.searchsorted(self.borders, ops.abs(scaled), right=True), 0)
        return ops.round(scaled / spacing) * spacing / scale


@cache
def _rounding(form):
    with outside_of_meta():  # a capture may be the first to ask
        return _Rounding(*FORMATS[form])


def simulated(x, largest, form):
    """`x` rounded to the numbers of a format times the tensor's scale, in its own dtype: a policy's `quantize`.

    Args:
        x: a tensor, or a rank's part of it.
        largest: the largest absolute value of the whole tensor, a tensor of one element.
        form: key of `FORMATS`.
    """
    return ops.cast(_rounding(form)(x, largest), x.dtype)


@dataclass(frozen=True)
class Fp8Policy:
    """How a linear layer multiplies: inputs and weights are rounded, and backward the gradient of the result.

    Weights keep their precision, and so do gradients of inputs and weights, as if nothing were rounded.

    Attributes:
        forward, backward: keys of `FORMATS`, of inputs and weights, and of gradients.
        quantize: function as `simulated`, which a device fills by a kernel, in PyNative and under `@ms.jit`.
    """

    forward: str = "e4m3"
    backward: str = "e5m2"
    quantize: Callable = simulated


POLICIES = {"e4m3": Fp8Policy(backward="e4m3"), "hybrid": Fp8Policy()}


@cache
def fp8_policy(name):
    """The `Fp8Policy` of a name: a key of `POLICIES`, or the import path "package.module:NAME" of one.

    Raises:
        ValueError: no such name, or the import path of something else.
    """
    found = POLICIES.get(name) or (import_object(name, "fp8") if ":" in name else None)
    if not isinstance(found, Fp8Policy):
        known = f"{', '.join(POLICIES)}, or package.module:NAME of an Fp8Policy"
        raise ValueError(f"fp8: {name!r} should be one of {known}{nearest(name, POLICIES)}")
    return found


def get_fp8_context(config, layer_no=-1, is_init=False):
    """While open, linear layers that are built multiply in float8, if the config says so (the name is Megatron-LM's).

    Args:
        config: has `fp8`, None or a name as of `fp8_policy`, and may have `first_last_layers_bf16`: the first
            `num_layers_at_start_in_bf16` and the last `num_layers_at_end_in_bf16` of its `num_hidden_layers` then
            multiply in their own dtype.
        layer_no: number of the layer in the whole model, from 0. Default: of no layer.
        is_init: whether layers are built. They multiply as they were built, so running them needs no context.

    Raises:
        ValueError: as of `fp8_policy`; float8 without `is_init`, or by another recipe than "tensorwise".
    """
    name = getattr(config, "fp8", None)
    if name is not None and layer_no >= 0 and getattr(config, "first_last_layers_bf16", False):
        end = config.num_hidden_layers - config.num_layers_at_end_in_bf16
        name = name if config.num_layers_at_start_in_bf16 <= layer_no < end else None
    if name is None:
        return entered(process_state().memo(__name__), "policy", None) if is_init else nullcontext()
    fp8_policy(name)
    if not is_init:
        raise ValueError("get_fp8_context(is_init=False): linear layers multiply as they were built: build them in it")
    if (recipe := getattr(config, "fp8_recipe", "tensorwise")) != "tensorwise":
        raise ValueError(f"fp8_recipe: {recipe!r} should be 'tensorwise', a scale for every tensor at every time")
    return entered(process_state().memo(__name__), "policy", name)


def current_fp8():
    """The name of the policy with which linear layers are built now, or None."""
    return process_state().memo(__name__).get("policy")


def fp8_dense(x, weight, name):
    """`x @ weight.T` by the policy of a name: (…, in) and (out, in) to (…, out)."""
    policy = fp8_policy(name)
    x, weight = (_round(each, _largest(each), policy.forward, name) for each in (x, weight))
    return _round_gradient(ops.dense(x, weight), policy.backward, name)


def largest(x):
    """The largest absolute value of a tensor, without a gradient."""
    return ops.amax(ops.abs(ops.stop_gradient(x)))


def rounded(x, largest, form, name):
    """`x` by a policy's `quantize`; the gradient is that of `x`. The difference that is added is exact (Sterbenz)."""
    value = ops.stop_gradient(x)
    return x + (fp8_policy(name).quantize(value, ops.stop_gradient(largest), form) - value)


class _Probe(nn.Cell):
    """`y`, whose gradient is rounded, and a probe for each part of `y`: its gradient is the part's largest one."""

    def __init__(self, form, name, parts):
        super().__init__(auto_prefix=False)
        self.form, self.parts, self.quantize = form, parts, fp8_policy(name).quantize
        self.used_bprop_inputs = (2,)  # the gradients: PyNative doesn't keep `y`

    def construct(self, y):
        probe = ops.slice(ops.reshape(y, (1, -1)), (0, 0), (1, 1))  # any numbers, but no constants, which have none
        return ops.expand_dims(y, 0), ops.broadcast_to(probe, (1, self.parts))

    def bprop(self, y, out, dout):
        return (self.quantize(ops.reshape(dout[0], dout[0].shape[1:]), ops.amax(dout[1]), self.form),)


class _Probed(nn.Cell):
    """`y`, with whose gradient a probe, of shape (1,), gets the largest absolute value of it."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.used_bprop_inputs = (3,)

    def construct(self, y, probe):
        return ops.expand_dims(y, 0)

    def bprop(self, y, probe, out, dout):
        gradient = ops.reshape(dout, dout.shape[1:])
        return gradient, ops.reshape(ops.amax(ops.abs(gradient)), (1,))


_probe_cell, _probed_cell = cache(_Probe), cache(_Probed)


def probe(y, form, name, parts):
    """`_Probe`; the operators behind a Cell with a `bprop` are for graphs, see `communicator._Shared`."""
    y, probes = _probe_cell(form, name, parts)(y)
    return ops.reshape(y, y.shape[1:]), ops.reshape(probes, (parts,))


def probed(y, part):
    """`_Probed`."""
    y = _probed_cell()(y, part)
    return ops.reshape(y, y.shape[1:])


def round_gradient(y, form, name):
    """`y`, whose gradient is rounded by a policy's `quantize`."""
    return probed(*probe(y, form, name, 1))


def _round_gradient_of_parts(_, args, context):
    """The gradient's largest value is that of all parts, which their probes give; what is varying is summed before."""
    y, form, name = args
    layout, mesh = context.layouts[0], context.mesh
    one_sum = layout.replace(varying=())
    axes = tuple(axis for axis in mesh.axis_names if axis in layout.cut_axes)
    y, probes = _probe(context.redistribute(y, layout, one_sum), form, name, mesh.axis_size(*axes))
    part = context.redistribute(probes, Layout.on(mesh, [()]), Layout.on(mesh, [axes]))
    return context.redistribute(_probed(y, part), one_sum, layout)


def _maximum(x):
    return equation("... ->", x, reduced={f"d{dim}": "max" for dim in range(x.ndim)})


def _operator(name, function, rule, **facts):
    register_operator(name, source=f"{__name__}.{function.__name__}", saves=NOTHING, **facts)(rule)
    return custom_operator(name, function)


register_algorithm(Algorithm("fp8", "the largest gradient of all parts", False, _round_gradient_of_parts))
_largest = _operator("Fp8Largest", largest, _maximum, gradient=NO_GRADIENT)
_round = _operator("Fp8Round", rounded, elementwise, operations=8)
_rule = partial(elementwise, linear=({0},), run="fp8")
_round_gradient = _operator("Fp8RoundGradient", round_gradient, _rule, operations=8, algorithms=("fp8",))
_probe = _operator("Fp8Probe", probe, lambda y, *given: equation("... -> ..., N", y, sizes={"N": given[-1]}))
_probed = _operator("Fp8Probed", probed, lambda y, part: equation("..., P -> ...", y, part))
