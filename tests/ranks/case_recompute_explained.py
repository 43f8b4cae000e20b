"""What `explain()` says is sent again is what is: calls and bytes, also of distributed algorithms."""

import mindspore as ms
from case_recompute import FULL, OPERATORS, Tower, X
from mindspore import Tensor
from support.launch import on_ranks

from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.communication import count_collectives
from mindformers_core.explaining.report import make_report
from mindformers_core.mesh import init_device_mesh
from mindformers_core.recompute import recompute
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import programs, shard


@on_ranks(2)
def case_what_is_sent_again_is_explained():
    counts = []
    for settings in ({}, FULL, OPERATORS, {**FULL, "mp_comm_recompute": False}):
        mesh = init_device_mesh((1, 2), ("dp", "tp"))
        cell = recompute(shard(Tower(range(3), True), mesh).set_train(), **settings)
        gradient_of = ms.value_and_grad(lambda x, cell=cell: cell(x).to_local(), None, cell.trainable_params())
        with count_collectives() as sent:
            gradient_of(Tensor(X))
        assert told(cell) == dict(sent), settings
        counts.append(sent["all_gather", ("tp",)][0])
    plain, full, operators, kept = counts
    assert min(operators, full) > plain == kept, counts


def told(cell):
    """`(name, axes) -> (number, bytes)` of what is sent by the program that ran last."""
    plan, found = programs(cell)[-1].plan, {}
    activations = tree_of(cell).activations.explained(plan)
    for (axes, _, name), both in make_report(plan, algorithm_of, activations).traffic.items():
        before = found.get((name, axes), (0, 0))
        found[name, axes] = tuple(map(sum, zip(before, both)))
    return found
