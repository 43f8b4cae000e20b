"""Element by element, and Fourier transforms: as authors call them, verified on simulated ranks."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops
from support.verified_calls import (
    Sample,
    complex_of,
    numbers,
    stopped,
)

X, Y = numbers(4, 4), numbers(4, 4)
SMALL, AROUND = X / 4, X - 1.2
CUBE, SPECTRUM = numbers(4, 4, 4), (numbers(4, 4, 4), numbers(4, 4, 4))


def several(*functions):
    """The results of several functions of the same tensors."""
    return lambda *tensors: [function(*tensors) for function in functions]


def of_integers(*functions, dtype=ms.int32):
    """The results for integers; and the numbers, for a gradient."""
    return lambda *tensors: [*several(*functions)(*[ops.cast(x * 8, dtype) for x in tensors]), tensors[0] * 2.0]


METHODS = ("acos", "asin", "asinh", "atan", "frac", "isneginf")
BESSEL = (ops.bessel_i0, ops.bessel_i0e, ops.bessel_i1, ops.bessel_i1e, ops.bessel_j0, ops.bessel_j1, ops.bessel_k0)
MORE_BESSEL = (ops.bessel_k0e, ops.bessel_k1, ops.bessel_k1e, ops.bessel_y0, ops.bessel_y1)
ELEMENTWISE = (
    Sample("inverse_hyperbolic", several(ops.asinh, lambda x: ops.acosh(x + 0.7)), (X,)),
    Sample("methods", several(*(lambda x, n=name: getattr(x, n)() for name in METHODS)), (SMALL,)),
    Sample("acosh_method", several(lambda x: (x + 0.7).acosh(), lambda x: x.logaddexp2(x)), (X,)),
    Sample("inverse_of_small", several(ops.atanh, ops.erfinv, mint.erfinv, mint.atanh, ops.Erfinv()), (SMALL,)),
    Sample("bessel", several(*BESSEL), (X,)),
    Sample("more_bessel", several(*MORE_BESSEL), (X,)),
    Sample("gamma_functions", several(ops.lgamma, ops.digamma, lambda x: ops.mvlgamma(x + 2, 2)), (X,)),
    Sample("polygamma", lambda x: ops.polygamma(Tensor(1), x), (X,)),
    Sample("sinc", several(ops.sinc, mint.sinc, ops.softsign, nn.Softsign(), ops.i0), (AROUND,)),
    Sample("shrinks", several(ops.hardshrink, ops.softshrink, ops.hardtanh, ops.tanhshrink), (AROUND,)),
    Sample("logit", stopped(lambda x: ops.logit(x, 1e-3)), (SMALL,)),
    Sample("zero_gradients", several(stopped(ops.Rint()), ops.Eps()), (AROUND,)),
    Sample("signs", several(ops.isneginf, ops.isposinf, ops.signbit), (AROUND,)),
    Sample("two", several(ops.fmax, ops.hypot, ops.nextafter, ops.xdivy), (X, Y)),
    Sample("two_broadcast", several(ops.hypot, ops.xdivy, ops.DivNoNan(), ops.MulNoNan()), (numbers(2, 4, 4), Y)),
    Sample("two_rows", several(ops.DivNoNan(), ops.MulNoNan(), ops.logaddexp2), (X, numbers(4))),
    Sample("gamma_of_two", several(ops.igamma, ops.igammac, lambda x, y: ops.zeta(x + 1, y)), (X, Y)),
    Sample("no_gradient_of_two", several(stopped(ops.heaviside)), (AROUND, Y)),
    Sample("close", several(ops.isclose, ops.approximate_equal, ops.ApproximateEqual(0.3)), (X, X + np.round(Y - 1))),
    Sample("integers", of_integers(ops.gcd, ops.lcm, ops.bitwise_left_shift, ops.bitwise_right_shift), (X, Y)),
    Sample("counted_bits", of_integers(ops.PopulationCount(), dtype=ms.int16), (X,)),
    Sample("polar", lambda r, angle: several(ops.real, ops.imag)(ops.polar(r, angle)), (X, Y)),
    Sample("complex", complex_of(several(ops.real, ops.imag, ops.angle, ops.abs, ops.view_as_real)), (X, Y)),
    Sample("conjugate", complex_of(lambda z: several(ops.real, ops.imag)(ops.conj(z))), (X, Y)),
)


def _fourier(name, function, gathered, inputs=SPECTRUM):
    if len(inputs) == 1:
        return Sample(name, function, inputs, [f"cut_0_{dim}" for dim in gathered])
    return Sample(name, complex_of(function), inputs, ["Complex"] * 2 * len(gathered))


FOURIER = (
    *(_fourier(name, getattr(ops, name), (2,)) for name in ("fft", "ifft", "irfft")),
    *(_fourier(name, getattr(ops, name), (1, 2)) for name in ("fft2", "ifft2", "irfft2")),
    *(_fourier(name, getattr(ops, name), (0, 1, 2)) for name in ("fftn", "ifftn", "irfftn")),
    *(_fourier(f"{name}_of_reals", getattr(ops, name), (2,), (CUBE,)) for name in ("fft", "rfft")),
    _fourier("rfft2", ops.rfft2, (1, 2), (CUBE,)),
    *(_fourier(name, getattr(ops, name), (0, 1, 2), (CUBE,)) for name in ("rfftn", "fftshift", "ifftshift")),
    _fourier("fftshift_of_complex", ops.fftshift, (0, 1, 2)),
    _fourier("fft_resized", lambda x: ops.fft(x, 6, 0, "ortho"), (0,)),
    _fourier("rfft_resized", lambda x: ops.rfft(x, 6, 1), (1,), (CUBE,)),
    _fourier("irfft_resized", lambda x: ops.irfft(x, n=5, dim=-2), (1,)),
    _fourier("fft2_resized", lambda x: ops.fft2(x, (2, 6), (0, -1)), (0, 2)),
    _fourier("rfft2_resized", lambda x: ops.rfft2(x, s=(2, 6), dim=(2, 0)), (0, 2), (CUBE,)),
    _fourier("fftn_resized", lambda x: ops.fftn(x, s=(2, 6)), (1, 2)),
    _fourier("fftn_two_dims", lambda x: ops.fftn(x, dim=(0, 2)), (0, 2), (CUBE,)),
    _fourier("fftshift_one_dim", lambda x: ops.fftshift(x, 1), (1,), (CUBE,)),
)

F = mint.nn.functional
WITHOUT_KERNEL = (
    Sample("mint", several(mint.acosh, mint.asinh, mint.acos, mint.asin, mint.atan, mint.exp2, mint.frac), (SMALL,)),
    Sample("mint_activations", several(F.relu6, F.hardtanh, lambda x: F.threshold(x, 0.5, 2.0)), (X,)),
    Sample("mint_signs", several(mint.isneginf, lambda x: x.isneginf()), (X,)),
    Sample("fmin", ops.fmin, (X, Y)),
    Sample("sum_of_list", lambda x, y: ops.accumulate_n([x, y]), (X, Y)),
    Sample("fills", lambda x: ops.fills(x, 2.0), (X,)),
    # right in every second call on CPU
    *(_fourier(name, getattr(ops, name), (2,)) for name in ("hfft",)),
    *(_fourier(name, getattr(ops, name), (1, 2)) for name in ("hfft2",)),
    *(_fourier(name, getattr(ops, name), (0, 1, 2)) for name in ("hfftn",)),
    _fourier("ihfft", ops.ihfft, (2,), (CUBE,)),
    _fourier("ihfft2", lambda x: ops.ihfft2(x, s=(2, 6)), (1, 2), (CUBE,)),
    _fourier("ihfftn", ops.ihfftn, (0, 1, 2), (CUBE,)),
    _fourier("hfft_resized", lambda x: ops.hfft(x, 5, 1), (1,)),
)
SAMPLES = (*ELEMENTWISE, *FOURIER)
SOME = (*ELEMENTWISE[::4], *FOURIER[::5])
