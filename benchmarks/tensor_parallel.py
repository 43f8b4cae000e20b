"""Tensor parallelism on 2 ranks against one process and collectives written by hand; and what an operator costs.

Four layers of an MLP and of a transformer, forward and backward, gradients of the input and of all parameters.
`single` is the single-card model on rank 0 while rank 1 waits; `handwritten` is what an expert writes in MindSpore
(see tensor_parallel_models.py); `generated` is the single-card model after `shard()`, `eager` the same operator by
operator. That all give the same loss and the same gradients is checked before any is timed. The operator is a matmul of
small local matrices: all of it is host time.
"""

import sys
from itertools import count

import mindspore as ms
import numpy as np
from harness import Variant, ratio_remarks, run_benchmark
from mindspore import Tensor, ops
from tensor_parallel_models import HandwrittenDecoderLayer, HandwrittenMLPLayer, MLPLayer, Stack

from mindformers_core.communication import world
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models import LlamaConfig
from mindformers_core.models.decoder import DecoderLayer
from mindformers_core.models.positions import places_seen
from mindformers_core.models.rotary import rotary_tables
from mindformers_core.sharding.initialize import materialize
from mindformers_core.tensor_parallel import DTensor, jit, shard

TP = 2
LAYERS, HIDDEN, LENGTH, BATCH = 4, 256, 128, 8
MLP_INNER = 4 * HIDDEN
TITLE = f"{LAYERS} layers, hidden {HIDDEN}, length {LENGTH}, batch {BATCH}, float32, forward and backward, tp {TP}"
CONFIG = LlamaConfig(
    hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=8,
    vocab_size=HIDDEN, max_position_embeddings=LENGTH,
)  # fmt: skip
SEED = 5
TOLERANCE = 1e-5  # of a loss or gradient, relative to the largest value in it

SMALL = 8  # rows and columns of the operator's local matrices
CALLS = 500  # of the operator in one repeat
FRESH = 10  # shapes never seen before in one repeat
# µs of a DTensor's operator over a plain one in the same position: known, or of a shape that is new to MindSpore
MODEL_LIMIT = 1.03  # of a program's time over that of collectives written by hand, in the same mode
LIMITS = (("cached", "plain", 1.4), ("first", "plain_first", 3.0), ("first_marked", "plain_first", 4.5))  # ratios


def make_variants():
    """All variants, once the models are checked to agree."""
    mesh = init_device_mesh((TP,), ("tp",))
    mlp = (lambda _: MLPLayer(HIDDEN, MLP_INNER), lambda _: HandwrittenMLPLayer(HIDDEN, MLP_INNER, TP))
    decoder = (lambda n: DecoderLayer(CONFIG, n), lambda n: HandwrittenDecoderLayer(CONFIG, n, TP))
    tables = (*rotary_tables(LENGTH, CONFIG.head_dim, CONFIG.rope_theta), *places_seen(LENGTH, (0,))[1])
    models = model_variants("mlp", mesh, *mlp, ()) + model_variants("transformer", mesh, *decoder, tables)
    return models + operator_variants(mesh)


def model_variants(name, mesh, make_layer, make_handwritten, tables):
    """The variants of one model; the layers are made by number, from 1.

    Raises:
        ValueError: a variant computes something else than the single process.
    """
    numbers = range(1, LAYERS + 1)
    with ms.DeviceCtx("meta"):
        single, eager, generated = (Stack([make_layer(number) for number in numbers]) for _ in range(3))
    handwritten = Stack([make_handwritten(number) for number in numbers])
    materialize(single, SEED)
    shard(eager, mesh, seed=SEED, mode="eager")
    shard(generated, mesh, seed=SEED)
    weights = single.trainable_params()
    layouts = [parameter.layout for parameter in eager.trainable_params()]
    for parameter, whole, placed in zip(handwritten.trainable_params(), weights, layouts, strict=True):
        parameter.set_data(Tensor(whole.asnumpy()[placed.local_slices(whole.shape, world().rank)]))
    x = np.random.default_rng(SEED).normal(size=(BATCH, LENGTH, HIDDEN)).astype(np.float32)
    inputs = (Tensor(x), *tables)
    steps = {
        "single/pynative": gradients_of(single),
        "single/jit": compiled(gradients_of(single)),
        "handwritten/pynative": gradients_of(handwritten),
        "handwritten/jit": compiled(gradients_of(handwritten)),
        "generated/pynative": gradients_of(generated),
        "generated/jit": compiled(gradients_of(generated)),
        "eager": gradients_of(eager),
    }
    check_agreement(name, steps, inputs, weights, layouts)
    base = f"{name}/single/pynative"
    return [
        Variant(f"{name}/{kind}", base, finished(step, inputs), ranks=(0,) if kind.startswith("single") else None)
        for kind, step in steps.items()
    ]


def gradients_of(model):
    """A function that gives `(loss, (gradient of the first input, gradients of the parameters))`."""
    return ms.value_and_grad(model, 0, model.trainable_params())


def compiled(step):
    """`step` as one graph."""

    @jit
    def run(*inputs):
        return step(*inputs)

    return run


def finished(step, inputs):
    """A function that runs a step and returns when it is computed.

    A graph runs on behind its call, and `ms.runtime.synchronize()` does nothing on CPU. Its outputs come all at
    once, so that reading one is enough; and the input's gradient ends a backward pass in PyNative.
    """

    def run():
        _, (of_input, _) = step(*inputs)
        of_input.asnumpy()

    return run


def check_agreement(name, steps, inputs, parameters, layouts):
    """Compare every step's loss and gradients with the first one's, whose gradients are whole."""
    (_, first), *others = steps.items()
    truth = flat(first(*inputs))
    what = ["loss", "gradient of x", *(f"gradient of {parameter.name}" for parameter in parameters)]
    for kind, step in others:
        for label, mine, expected, placed in zip(what, flat(step(*inputs)), truth, [None, None, *layouts], strict=True):
            if mine.shape != expected.shape:
                expected = expected[placed.local_slices(expected.shape, world().rank)]
            error = np.abs(mine - expected).max() / np.abs(expected).max()
            if not error <= TOLERANCE:
                raise ValueError(f"{name}/{kind}: {label} differs from one card's by {error:.1e} of its largest value")


def flat(result):
    """Loss and gradients in one list, as arrays."""
    loss, (of_input, of_parameters) = result
    return [np.asarray(tensor.asnumpy()) for tensor in (loss, of_input, *of_parameters)]


def operator_variants(mesh):
    """A matmul on plain tensors, on DTensors in a known kind of call, and in calls never seen before.

    `cached` and `first` need no redistribution: both arguments are cut along the summed dim, as in a row-parallel
    linear. `first_marked` needs one, without communication: `x` is marked varying, as in a column-parallel linear.
    """
    fresh_rows = count(SMALL + 1)
    row, column = (layout(None, "tp"), layout("tp", None)), (layout(None, None), layout(None, "tp"))

    def plain(rows):
        return Tensor(np.ones((rows, SMALL), np.float32)), Tensor(np.ones((SMALL, SMALL), np.float32))

    def distributed(rows, layouts):
        return [DTensor.from_local(tensor, placed, mesh) for tensor, placed in zip(plain(rows), layouts)]

    known, known_distributed = plain(SMALL), distributed(SMALL, row)
    cases = (
        ("plain", lambda: [known] * CALLS),
        ("cached", lambda: [known_distributed] * CALLS),
        ("plain_first", lambda: [plain(next(fresh_rows)) for _ in range(FRESH)]),
        ("first", lambda: [distributed(next(fresh_rows), row) for _ in range(FRESH)]),
        ("first_marked", lambda: [distributed(next(fresh_rows), column) for _ in range(FRESH)]),
    )
    return [
        Variant(f"op/matmul/{kind}", "op/matmul/plain", multiply, prepare, (0,), FRESH if "first" in kind else CALLS)
        for kind, prepare in cases
    ]


def multiply(*pairs):
    """Each pair's product."""
    for x, y in pairs:
        ops.matmul(x, y)


def remarks(results):
    """What `shard()` costs over hand-written code, and a DTensor's operator over a plain one, against what it may.

    Returns:
        `(lines, whether all limits are kept)`.
    """
    ratios = []
    for model in ("mlp", "transformer"):
        for mode in ("pynative", "jit"):
            ratios.append((f"{model}/generated/{mode}", f"{model}/handwritten/{mode}", MODEL_LIMIT))
        ratios.append((f"{model}/generated/jit", f"{model}/generated/pynative", None))
        ratios.append((f"{model}/eager", f"{model}/handwritten/pynative", None))
    ratios += [(f"op/matmul/{kind}", f"op/matmul/{base}", limit) for kind, base, limit in LIMITS]
    return ratio_remarks(results, ratios)


if __name__ == "__main__":
    sys.exit(run_benchmark(__file__, TP, make_variants, TITLE, remarks))
