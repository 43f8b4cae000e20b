"""Whose bytes copies are that operators keep of views, in what `explain()` and `list_operators()` tell."""

from types import SimpleNamespace

import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops
from support.saved_tensors import saved_bytes
from support.small_cells import cell_of
from test_recompute_explained import IDS, explained
from test_recompute_gradients import llama, sharded

from mindformers_core.analysis.forward_trace import Memory
from mindformers_core.capture.algorithm_graph import algorithm_of
from mindformers_core.mesh import init_device_mesh
from mindformers_core.operators import tensor_meta
from mindformers_core.program.operator_names import operator_texts
from mindformers_core.recompute import list_operators, recompute
from mindformers_core.recompute.explained import bytes_not_kept, keepers_by_key
from mindformers_core.tensor_parallel import prepare, shard

pytestmark = pytest.mark.usefixtures("one_rank")


def test_a_copy_counts_for_who_makes_the_view():
    """A product of a view keeps one."""
    weight = Parameter(Tensor(np.ones((4, 4), np.float32)))
    turned = cell_of(lambda self, x: ops.matmul(ops.transpose(x * self.weight, (1, 0)), self.weight), weight=weight)
    net = recompute(shard(turned.set_train(), init_device_mesh((1,), ("tp",))), select=".Transpose")
    plan = prepare(net, tensor_meta((4, 4), "float32")).plan
    before, after = (saved_bytes(plan, keys, algorithm_of) for keys in (frozenset(), frozenset(keepers_by_key(plan))))
    marks = {mark.kind: mark.nbytes for mark in explained(net, plan).notes.values()}
    assert marks == {"recomputed": 64, "kept for others": 64} and before == after


def test_copies_count_for_who_makes_the_views():
    """Softmax for its result alone, transposes for the copies that both products keep; so they are listed, too."""
    net = recompute(sharded(llama), select="*.core_attention")
    plan = prepare(net, IDS, IDS).plan
    attention = "model.layers.0.self_attn.core_attention."
    names = {key: name for key, name in operator_texts(plan).items() if name.startswith(attention)}
    marks = explained(net, plan).notes
    found = {name.removeprefix(attention): marks[key].nbytes for key, name in names.items() if key in marks}
    saving = {"query": 2048, "Reshape[0]": 2048, "weights": 2048, "Reshape[1]": 2048}
    assert {name: nbytes for name, nbytes in found.items() if nbytes} == saving
    assert {"key", "value", "MatMul[0]", "scores"} <= found.keys()
    listed = {entry.name.removeprefix(attention): entry.saved_bytes for entry in list_operators(net, IDS, IDS)}
    assert {name: listed[name] for name in found if listed[name]} == saving


def test_a_copy_counts_also_behind_a_move_that_does_nothing():
    links = SimpleNamespace(producers={(0,): (), (1,): ((0,),), (2,): ((1,),)}, nbytes={(0,): 8, (1,): 8, (2,): 4})
    before, after = [Memory((2,), 0, 8), Memory((2,), 1, 5)], [Memory((2,), 1, 5)]
    assert bytes_not_kept(links, {(0,)}, before, after) == {(0,): 8, (2,): 0}
