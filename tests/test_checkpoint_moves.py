"""Moves between layouts: random pairs, with arrays as the ranks' parts; every rank receives what it lacks, once."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from test_checkpoint_regions import random_layout

from mindformers_core.checkpoint.between_meshes import relayout
from mindformers_core.checkpoint.moves import plan_moves
from mindformers_core.checkpoint.parts import Part
from mindformers_core.checkpoint.regions import inside, local_box, overlap, volume, whole


def parts_in(layout, shape):
    """The parts of a tensor on all ranks of a layout."""
    return {
        rank: [Part("model", "w", "float32", shape, local_box(layout, shape, rank))] for rank in layout.mesh.rank_list
    }


@pytest.mark.parametrize("seed", range(60))
def test_every_rank_receives_what_it_lacks_once(seed):
    rng = np.random.default_rng(seed)
    one, shape = random_layout(rng)
    other, factors = random_layout(rng)
    while len(other.dims) != len(one.dims):
        other, factors = random_layout(rng)
    shape = tuple(size * factor for size, factor in zip(shape, factors))
    value = rng.standard_normal(shape)
    sources, targets = parts_in(one, shape), parts_in(other, shape)
    held = {rank: value[inside(parts[0].box, whole(shape))] for rank, parts in sources.items()}
    found = {}
    for rank, (part,) in targets.items():
        found[rank] = np.full([stop - start for start, stop in part.box], np.nan)
        common = overlap(sources[rank][0].box, part.box) if rank in sources else None
        if common is not None:
            found[rank][inside(common, part.box)] = held[rank][inside(common, sources[rank][0].box)]
    for move in plan_moves(sources, targets, most=64):
        assert move.nbytes == volume(move.box) * 4 <= 64
        place = inside(move.box, targets[move.receiver][0].box)
        assert np.isnan(found[move.receiver][place]).all()  # nothing arrives twice
        found[move.receiver][place] = held[move.sender][inside(move.box, sources[move.sender][0].box)]
    for rank, (part,) in targets.items():
        np.testing.assert_array_equal(found[rank], value[inside(part.box, whole(shape))])


def test_senders_are_balanced():
    """A tensor that four ranks hold and four others take: each sends as much as the others."""
    whole_part = [Part("model", "w", "float32", (64,), ((0, 64),))]
    moves = plan_moves(dict.fromkeys(range(4), whole_part), dict.fromkeys(range(4, 8), whole_part), most=16)
    sent = {}
    for move in moves:
        sent[move.sender] = sent.get(move.sender, 0) + move.nbytes
    assert sent == dict.fromkeys(range(4), 256)


def test_other_models_are_errors():
    part = Part("model", "weight", "float32", (4,), ((0, 4),))
    with pytest.raises(ValueError, match=r"the source has no model tensor 'weigt'.*'weight'"):
        plan_moves({0: [part]}, {0: [Part("model", "weigt", "float32", (4,), ((0, 4),))]})
    with pytest.raises(ValueError, match=r"'weight' is float32 of shape \(4,\) in the source, but float16 of shape"):
        plan_moves({0: [part]}, {0: [Part("model", "weight", "float16", (4,), ((0, 4),))]})


@pytest.mark.usefixtures("one_rank")
def test_stages_of_one_rank_with_a_tied_weight():
    class Stage(nn.Cell):
        def __init__(self, value):
            super().__init__()
            self.w = Parameter(Tensor(np.full(4, value, np.float32)))

    targets = [Stage(5), Stage(6)]
    report = relayout([Stage(1), Stage(1)], targets)
    assert (report.sent, report.received, report.copied) == (0, 0, 16)
    assert [stage.w.asnumpy().tolist() for stage in targets] == [[1.0] * 4] * 2
