"""Experts on real ranks: tokens go to them and back, as many rows as there are, in PyNative and compiled."""

from itertools import product
from unittest.mock import patch

import mindspore as ms
import numpy as np
from case_training import COMPILED, compare_with_one_rank, job_on, training_alone
from mindspore import Tensor, nn, ops
from mindspore.graph import api
from support.host_reads import count_reads
from support.launch import on_ranks
from support.recomputations import count_recomputations
from support.routed_layer import CASES, Case, Config, check_here, train_alone

from mindformers_core import recompute
from mindformers_core.communication import backend_cpu, count_collectives, world
from mindformers_core.layout import layout
from mindformers_core.mesh import init_device_mesh
from mindformers_core.models.experts import RoutedExperts
from mindformers_core.redistribution import routing_step
from mindformers_core.tensor_parallel import shard

ON_TWO = [Case("dp2", ("dp", None), ("dp",), zero={"shard_size": 2}, capacity=each) for each in (None, (2, 4))]


def check(case, steps, compiled):
    """Gradients, losses, norms and parameters, also where experts get nothing, a rank gets all, and with ties."""
    mesh = init_device_mesh(case.mesh.shape, case.mesh.axis_names)
    check_here(case, mesh, steps, train_alone(case, steps), compiled)


@on_ranks(2)
def case_experts_train_as_on_one_card():
    """Top-2 of 8 experts with biases, a shared one, and all losses; compiled once, though a rank's experts get other
    numbers of rows in each step, which go as large tensors do. With capacities: `test_experts`."""
    check(ON_TWO[0], 3, compiled=False)
    with patch.object(api, "_check_recompile") as compilations, patch.object(backend_cpu, "_SHARED_FROM", 256):
        check(ON_TWO[0], 3, compiled=True)
    assert compilations.call_count == 1


@on_ranks(nightly=(2, 4, 8))
def case_all_experts_train_as_on_one_card():
    """On all meshes of so many ranks; on more than two in few steps, since these share the cores."""
    for case, compiled in product((*ON_TWO, *CASES[1:]), (False, True)):
        if case.mesh.size == world().size:
            check(case, 20 if world().size == 2 else 3, compiled)


@on_ranks(nightly=(4,))
def case_experts_on_four_ranks_exchange_large_tensors():
    """In graphs, of joint axes and of two copies of the experts."""
    with patch.object(backend_cpu, "_SHARED_FROM", 256):
        for place in (4, 8):
            check(CASES[place], 1, compiled=True)


class Total(nn.Cell):
    """A number of what experts make of tokens."""

    def __init__(self):
        super().__init__()
        self.experts = RoutedExperts(8, 16, 4)

    def construct(self, x, ids, weights):
        return ops.sum(ops.square(self.experts(x, ids, weights)))


PLAN = {"": {"input": dict.fromkeys(("x", "ids", "weights"), layout("dp"))}}


@on_ranks(2)
def case_balanced_choices_send_as_many_bytes_as_the_formula_says():
    """Where every expert has as many choices of each rank, (n - 1) / n of them go to another rank, and back."""
    mesh, tokens = init_device_mesh((2,), ("dp",)), 12
    for count in (2, 8):  # fewer choices than a rank has experts, and more
        net = shard(Total(), mesh, Config(("dp",)), PLAN)
        ids = np.arange(tokens * count, dtype=np.int32).reshape(1, tokens, count) % 8
        x, weights = np.ones((1, tokens, 16), np.float32), np.ones((1, tokens, count), np.float32)
        with count_collectives() as counts:
            ms.grad(net, (0, 2))(Tensor(x), Tensor(ids), Tensor(weights))
        sent = tokens * count * 16 * 4 // 2
        step = routing_step("dispatch", mesh, ("dp",), (tokens * count, 16), "float32", 2 * tokens * min(count, 4))
        assert (step.forward, step.backward) == (("dispatch", sent), ("combine", sent))
        assert counts["dispatch", ("dp",)] == counts["combine", ("dp",)] == (2, 2 * sent), dict(counts)
        assert ("all_to_all", ("dp",)) in counts  # of the experts' numbers


class Block(nn.Cell):
    """Experts, whose result isn't the last one of the Cell, so that they may be recomputed."""

    def __init__(self):
        super().__init__()
        self.experts = RoutedExperts(8, 16, 4)

    def construct(self, x, ids, weights):
        return ops.tanh(self.experts(x, ids, weights) * 2)


class Blocks(nn.Cell):
    """A number of two layers with experts."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def construct(self, x, ids, weights):
        return ops.sum(ops.square(self.second(self.first(x, ids, weights), ids, weights)))


def reads_of(net, given):
    """What the host reads in a forward pass, and until the end of the backward pass; and what is computed again."""
    with count_reads() as reads, count_recomputations() as again:

        def followed(*given):
            found = net(*given)
            forward.append(len(reads))
            return found

        gradients_of, forward = ms.grad(followed, (0, 2), net.trainable_params()), []
        gradients_of(*given)  # the program is made
        reads.clear()
        again.clear()
        gradients_of(*given)
    return forward[-1], reads, again


@on_ranks(2)
def case_the_host_reads_one_tensor_in_a_layer_of_experts():
    """Forward; none backward, nor where layers are recomputed, in both engines."""
    mesh, random = init_device_mesh((2,), ("dp",)), np.random.default_rng(3 + world().rank)
    ids = Tensor(np.argsort(random.random((1, 12, 8)), -1)[..., :2].astype(np.int32))
    x, weights = (Tensor(random.random((1, 12, size)).astype(np.float32)) for size in (16, 2))
    for mode, selected in (("generated", ()), ("generated", ("first", "second")), ("eager", ())):
        net = shard(Blocks(), mesh, Config(("dp",)), PLAN, mode=mode)
        net = recompute(net, select=list(selected)) if selected else net
        forward, reads, again = reads_of(net, (x, ids, weights))
        assert forward == len(reads) == 2, (mode, selected, forward, reads)
        assert bool(again) == bool(selected)


RECIPE = (
    "model.name=qwen3_moe", "model.num_hidden_layers=2", "model.mlp_only_layers=[0]", "model.num_experts=4",
    "model.num_experts_per_tok=2", "model.moe_intermediate_size=16", "model.head_dim=8",
    "model.output_router_logits=true", "model.router_aux_loss_coef=0.1", "model.router_z_loss_coef=0.1",
)  # fmt: skip
ONE_LAYER = *RECIPE, "model.num_hidden_layers=1", "model.mlp_only_layers=[]"
BY_DATA = "parallelism.expert_parallel=[dp]", "training.local_batch_size=1"
BY_TOKENS = (
    "parallelism.expert_parallel=[cp,tp]",
    "parallelism.context_parallel=2",
    "parallelism.sequence_parallel=true",
)


@on_ranks(nightly=(2,))
def case_a_compiled_recipe_with_experts_trains_as_on_one_card():
    """Micro-batches are as large as on one card, since the routers' losses are those of each."""
    compare_with_one_rank(*BY_DATA, COMPILED, shape=(1, 2, 1, 1), alike=ONE_LAYER, micro_batches=4)


@on_ranks(nightly=(2, 4))
def case_a_compiled_pipeline_with_experts_trains_as_on_one_card():
    """Likewise, of two stages with experts, on four ranks cut ones, and two micro-batches."""
    both, dp = (*RECIPE, "model.mlp_only_layers=[]"), world().size // 2
    stages = "parallelism.pipeline_parallel=2", f"parallelism.pipeline_parallel_microbatch_size={2 // dp}"
    given = COMPILED, *stages, f"training.local_batch_size={4 // dp}", "parallelism.expert_parallel=[dp]"
    compare_with_one_rank(*given, shape=(2, dp, 1, 1), alike=both, micro_batches=2)


@on_ranks(nightly=(2,))
def case_experts_move_between_ranks():
    """The losses and norms of one card, in PyNative and compiled, though experts with their moments change ranks."""
    expected = [row for row, _ in training_alone(3, *ONE_LAYER)]
    for mode in (1, 0):
        moving = "moe.placement.interval=1", "moe.placement.threshold=1.02", f"context.mode={mode}"
        job = job_on((1, 2, 1, 1), None, *ONE_LAYER, *BY_DATA, *moving)
        rows = [dict(job.train_step()) for _ in expected]
        assert sum(row["experts_moved"] for row in rows[:2]), rows
        for key in ("loss", "gradient_norm"):
            found, wanted = ([row[key] for row in each] for each in (rows, expected))
            np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=f"{key} in mode {mode}")


INSIDE = *BY_DATA, "parallelism.expert_tensor_parallel=[tp]", "parallelism.zero_level=2"


@on_ranks(nightly=(4,))
def case_recipes_with_experts_train_as_on_one_card():
    """Losses, norms and parameters, where ranks share batches or sequences, and experts or their inner dims."""
    compare_with_one_rank(*INSIDE, alike=RECIPE, micro_batches=4)
    compare_with_one_rank(*BY_TOKENS, shape=(1, 1, 2, 2), alike=RECIPE)


@on_ranks(nightly=(4,))
def case_compiled_recipes_with_cut_experts_train_as_on_one_card():
    """Likewise, in graph mode, where layers are recomputed."""
    compare_with_one_rank(*INSIDE, COMPILED, "recompute=true", alike=ONE_LAYER, micro_batches=4, steps=1)


@on_ranks(nightly=(4,))
def case_compiled_recipes_with_experts_of_sequences_train_as_on_one_card():
    """Likewise, on cp x tp."""
    compare_with_one_rank(*BY_TOKENS, COMPILED, shape=(1, 1, 2, 2), alike=ONE_LAYER, steps=1)
