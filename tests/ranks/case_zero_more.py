"""What models, optimizers and users do under `hsdp()`, against one card."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn
from support.launch import on_ranks
from zero_towers import SIZE, Tower, adam, assert_equal, check_tower, examples, train_alone, train_tower, values_of

from mindformers_core.communication import world
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh, init_device_mesh
from mindformers_core.tensor_parallel import shard
from mindformers_core.zero import Lamb, LossScale, MixedPrecision, hsdp, value_and_grad

LEVELS = ("level1", "level2", "level3")
ENDS = LEVELS[::2]  # of what level 2 has no part of its own in


@on_ranks(2)
def case_frozen_weights_stay_and_let_gradients_through():
    """Frozen before hsdp(), in the middle; at level 3 they are cut, too."""
    for level in ENDS:
        net = check_tower(adam, "frozen", (1,), shard_size=2, optimizer_level=level)
        frozen = net.layers[1].weight
        assert not frozen.requires_grad and id(frozen) not in map(id, net.trainable_params())
        assert frozen.shape == ((SIZE // 2, SIZE) if level == "level3" else (SIZE, SIZE)), level
        frozen.requires_grad = True
        with pytest.raises(ValueError, match="requires_grad of 'layers.1.weight' has changed"):
            value_and_grad(net)(examples()[1])


@on_ranks(2)
def case_optimizers_update_parts():
    """MindSpore's own, with parameter groups; Lamb, whose norms are those of whole weights."""

    def groups(parameters):
        few, rest = parameters[:2], parameters[2:]
        settings = {"params": few, "lr": 0.1, "weight_decay": 0.1}, {"params": rest}, {"order_params": parameters}
        return nn.Adam([*settings], eps=0.1)  # as of `adam`

    def momentum(parameters):
        return nn.Momentum(parameters, 3e-4, 0.9, weight_decay=0.1)

    def sgd(parameters):  # at ten times this rate the loss grows, and with it the last digits' differences
        return nn.SGD(parameters, 3e-4, momentum=0.9, nesterov=True)

    def lamb(parameters):
        return Lamb(parameters, 0.05, weight_decay=0.1)

    for optimizer, level in ((groups, "level1"), (momentum, "level2"), (sgd, "level3"), (lamb, "level3")):
        check_tower(optimizer, optimizer.__name__, shard_size=2, optimizer_level=level)


@on_ranks(2)
def case_weights_that_no_rank_uses_get_zeros():
    """A layer that a step leaves out, beside weights that are never used."""
    for level in ENDS:
        net = check_tower(adam, "skipping", kwargs=(("skipping", True),), shard_size=2, optimizer_level=level)
        _, gradients = value_and_grad(net)(examples()[1], skipping=True)
        assert all(not gradients[number].asnumpy().any() for number in (2, 3)), level


@on_ranks(2)
def case_a_layer_that_one_rank_leaves_out_counts_there_as_zero():
    """Buckets come in the same order on all ranks, whatever order gradients come in."""
    whole, mine = examples()
    for settings in ({"optimizer_level": "level1"}, {"optimizer_level": "level2", "comm_fusion": 0}, {"shard_size": 1}):
        alone, halves = Tower(), np.split(whole.asnumpy(), 2)
        gradient_of = ms.value_and_grad(alone, None, ms.ParameterTuple(alone.trainable_params()))
        terms = [gradient_of(Tensor(half), skipping=rank == 0)[1] for rank, half in enumerate(halves)]
        expected = {
            path: (one + other).asnumpy() / 2 for (path, _), one, other in zip(alone.parameters_and_names(), *terms)
        }
        net = hsdp(Tower(), **{"shard_size": 2, "threshold": 0, **settings})
        _, gradients = value_and_grad(net)(mine, skipping=world().rank == 0)
        found = {path: g.asnumpy() for (path, _), g in zip(net.parameters_and_names(), gradients, strict=True)}
        assert_equal(net, found, expected, settings)


@on_ranks(2)
def case_gradients_are_sums_or_means():
    """Means where ranks have losses of their own, unless sums are asked for."""
    _, mine = examples()
    found = []
    for mean in (None, True, False):
        net = hsdp(Tower(), shard_size=2, gradients_mean=mean)
        found.append([gradient.asnumpy() for gradient in value_and_grad(net)(mine)[1]])
    for default, mean, total in zip(*found):
        np.testing.assert_array_equal(default, mean)
        np.testing.assert_allclose(2 * mean, total, 1e-6)
        assert total.any() or not mean.any()


# Precision


@on_ranks(2)
def case_half_precision_gradients_are_summed_in_float32():
    """A sum over ranks, and one over micro-steps, that float16 can't hold; and one whose last digit it would lose."""

    class Product(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = Parameter(Tensor(np.full((2, SIZE), 1e-3, np.float32)), name="weight")

        def construct(self, x):
            return (self.weight * x).sum()

    rank = world().rank
    policy = MixedPrecision(parameter="float32", compute="float16")
    for level in LEVELS:
        for terms, expected in (((40000.0, 40000.0), 160000.0), ((2048.0, 1.0), 4098.0)):
            settings = {"shard_size": 2, "threshold": 0, "optimizer_level": level, "gradients_mean": False}
            net = hsdp(Product(), accumulate_grad_step=2, mixed_precision=policy, **settings)
            gradient_of = value_and_grad(net)
            x = Tensor(np.full((2, SIZE), terms[rank], np.float32))
            assert gradient_of(x)[1] is None
            loss, [gradient] = gradient_of(x)
            assert (loss.dtype, gradient.dtype, net.weight.dtype) == (ms.float16, ms.float32, ms.float32)
            np.testing.assert_array_equal(gradient.asnumpy(), expected / 2, err_msg=f"{level} {terms}")


@on_ranks(2)
def case_mixed_precision_trains_as_it_does_on_one_rank():
    """Float32 weights, float16 computing: as on a mesh of this rank alone, and near float32."""

    def descent(parameters):
        return nn.SGD(parameters, 1e-4)

    whole, mine = examples()
    policy = MixedPrecision(parameter="float32", compute="float16", output="float32")
    own = DeviceMesh((1,), ("dp",), (world().rank,))
    alone = hsdp(Tower(), mesh=own, mixed_precision=policy)
    expected, first = train_tower(alone, value_and_grad(alone), whole, descent)
    _, true = train_alone(whole, descent)
    for level in ENDS:
        net = hsdp(Tower(), 2, 0, level, gradients_mean=False, mixed_precision=policy)
        found, gradients = train_tower(net, value_and_grad(net), mine, descent)
        error = 10 * 2**-11  # a gradient has about ten roundings to float16 behind it
        assert_equal(net, gradients, first, level, 0, error)
        assert_equal(net, gradients, true, level, 0, error)
        assert all(part.dtype == ms.float32 for part in net.trainable_params())
        largest = max(abs(gradient).max() for gradient in true.values())
        assert_equal(net, found, expected, level, 0, 3 * 1e-4 * error * largest)  # three steps of plain descent


@on_ranks(2)
def case_one_ranks_overflow_skips_the_step_on_all():
    """Nobody's weights change; the scale is halved everywhere; the next step is right."""
    whole, mine = examples()
    for level in ENDS:
        net = hsdp(Tower(), 2, 0, level, gradients_mean=False)
        scale = LossScale(amp.DynamicLossScaler(2**10, 2, 100), init_device_mesh((2,), ("dp",)))
        gradient_of, before = value_and_grad(net, loss_scale=scale), values_of(net)
        bad = mine * (np.inf if world().rank == 1 else 1.0)
        assert gradient_of(bad)[1] is None
        assert (scale.value, scale.skipped) == (2**9, 1)
        for path, value in values_of(net).items():
            np.testing.assert_array_equal(value, before[path])
        expected, _ = train_alone(whole)
        found, _ = train_tower(net, gradient_of, mine, adam)
        assert_equal(net, found, expected, level)


# Meshes


@on_ranks(4)
def case_a_cell_sharded_over_tensor_parallel_alone_trains():
    """The mesh of the Cell has no dp axis: the whole mesh is given, and pairs have losses of their own."""
    mesh = init_device_mesh((2, 2), ("dp", "tp"))
    whole, _ = examples()
    expected, first = train_alone(whole)
    plan = {"layers.*": {"weight": {"weight": layout("None", "tp")}}}
    dp = mesh.group_index(world().rank, ("dp",))
    mine = Tensor(np.split(whole.asnumpy(), 2)[dp])
    for level in ENDS:
        net = shard(Tower(), mesh.sub_mesh("tp", world().rank), plan=plan)
        hsdp(net, 2, 0, level, mesh=mesh, gradients_mean=False)
        assert net.layers[0].weight.shape == (SIZE // 2, SIZE // 2)
        found, gradients = train_tower(net, value_and_grad(net), mine, adam)
        assert_equal(net, gradients, first, level)
        assert_equal(net, found, expected, level)
