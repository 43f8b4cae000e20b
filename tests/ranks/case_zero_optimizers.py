"""`Lamb` of shards against `Lamb` of whole parameters; `LossScale` when one rank alone overflows."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp
from support.launch import on_ranks

from mindformers_core.communication import count_collectives, world
from mindformers_core.layout import Layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.tensor_parallel import jit
from mindformers_core.zero import Lamb, LossScale, all_finite

STEPS = 5
# dims of each parameter: whole, cut over one axis of two, over both on two dims or on one
PLACED = [((), ()), (("dp",), ()), ((), ("dp",)), ((), ("tp",)), (("dp",), ("tp",)), (("tp", "dp"), ()), (("dp",), ())]


def parameters_of(values, layouts):
    """This rank's parts as Parameters; all of them whole for no layouts."""
    parameters = []
    for index, value in enumerate(values):
        layout = layouts[index] if layouts else None
        mine = value if layout is None else value[layout.local_slices(value.shape, world().rank)]
        parameters.append(ms.Parameter(Tensor(np.ascontiguousarray(mine)), name=f"weight{index}"))
        if layout is not None:
            parameters[-1].layout = layout
    return parameters


def trained(optimizer, gradients, layouts, compiled):
    """The parameters after a step with each of `gradients`, and the all-reduces of one step in PyNative."""

    def step(*gradients):
        return optimizer(gradients)

    run = jit(step) if compiled else step
    for values in gradients:
        mine = [Tensor(parameter) for parameter in parameters_of(values, layouts)]
        with count_collectives() as counts:
            run(*mine)
    return [parameter.asnumpy() for parameter in optimizer.parameters], counts


@on_ranks(4)
def case_lamb_updates_shards_as_the_whole(compiled=False):
    """Five steps, with weight decay for half of the parameters; a zero weight is among them."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    layouts = [None, *(Layout.on(mesh, dims) for dims in PLACED)]
    generator = np.random.default_rng(1)
    values = [generator.normal(size=(4, 8)).astype(np.float32) for _ in layouts]
    values[-1][...] = 0
    # rows of very different sizes: a norm of a part would be far from that of the whole
    sizes = np.array([0.01, 1, 10, 100])[:, None] * np.linspace(0.1, 5, 8)
    gradients = [[(generator.normal(size=(4, 8)) * sizes).astype(np.float32) for _ in layouts] for _ in range(STEPS)]

    def optimizer(layouts):
        parameters = parameters_of(values, layouts)
        return Lamb([{"params": parameters[:4], "weight_decay": 0.1}, {"params": parameters[4:], "lr": 0.2}], 0.1)

    whole, nothing = trained(optimizer(None), gradients, None, compiled=False)
    assert not nothing
    parts, counts = trained(optimizer(layouts), gradients, layouts, compiled)
    if not compiled:
        once = {("all_reduce", axes): 1 for axes in (("dp",), ("tp",), ("dp", "tp"))}
        assert {kind: calls for kind, (calls, _) in counts.items()} == once
    for index, (part, value, layout) in enumerate(zip(parts, whole, layouts, strict=True)):
        mine = value if layout is None else value[layout.local_slices(value.shape, world().rank)]
        np.testing.assert_allclose(part, mine, rtol=1e-6, atol=1e-7, err_msg=f"weight{index}, {compiled=}")


@on_ranks(nightly=(4,))
def case_compiled_lamb_updates_shards_as_the_whole():
    """Daily on one rank: `test_zero_lamb`."""
    case_lamb_updates_shards_as_the_whole(compiled=True)


@on_ranks(4)
def case_all_ranks_skip_when_one_overflows():
    """Each rank in turn has the infinity; in between all are fine. A part of the ranks can agree among themselves."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    scale = LossScale(amp.DynamicLossScaler(2**10, 2, 2), mesh)
    seen = []
    for culprit in (0, None, 3, None, None, 2, 1):
        gradient = np.full((3,), 4.0, np.float32)
        gradient[1] = np.inf if culprit == world().rank else 4.0
        factor = scale.value
        unscaled = scale.unscale((Tensor(gradient), Tensor(np.ones((2, 2), np.float16))))
        assert (unscaled is None) == (culprit is not None), culprit
        if unscaled is not None:
            np.testing.assert_array_equal(unscaled[0].asnumpy(), gradient / factor)
        seen.append((scale.value, scale.skipped))
    assert seen == [(512, 1), (512, 1), (256, 2), (256, 2), (512, 2), (256, 3), (128, 4)]
    bad = Tensor(np.full(2, np.nan if world().rank == 3 else 0.0, np.float32))
    assert all_finite(mesh.sub_mesh("tp", world().rank), (bad,)) == (world().rank < 2)
    assert all_finite(None, (bad,)) == (world().rank != 3)
    assert not all_finite(mesh, () if world().rank == 1 else (bad,))
