"""Moves between layouts: random pairs, with arrays as the ranks' parts; every rank receives what it lacks, once."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from safetensors import safe_open
from support.checkpoint_states import QuickFiles
from test_checkpoint_regions import random_layout

from mindformers_core.checkpoint.between_meshes import relayout
from mindformers_core.checkpoint.load import load, open_checkpoint
from mindformers_core.checkpoint.moves import plan_moves
from mindformers_core.checkpoint.parts import Part
from mindformers_core.checkpoint.regions import inside, local_box, overlap, volume, whole
from mindformers_core.checkpoint.save import save
from mindformers_core.checkpoint.tensors import fill_parameter, model_parts, optimizer_parts
from mindformers_core.models.spec import FileTensor
from mindformers_core.optimizers.adamw import AdamW
from mindformers_core.optimizers.lamb import Lamb


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


DTYPES = ("float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8", "bool", "complex64")


class Many(nn.Cell):
    """A parameter of every dtype, a scalar, a frozen one, and an empty one."""

    def __init__(self, seed):
        super().__init__()
        values = np.random.default_rng(seed).standard_normal((3, 5)) * 50
        for dtype in DTYPES:
            setattr(self, dtype, Parameter(Tensor(values.astype(np.float32)).astype(getattr(ms, dtype)), name=dtype))
        self.scalar = Parameter(Tensor(values[0, 0], ms.float32), name="scalar")
        self.frozen = Parameter(Tensor(values[0], ms.float32), name="frozen", requires_grad=False)


def bits(parameter):
    return parameter.asnumpy().reshape(-1).view(np.uint8).tolist()


def test_all_dtypes_keep_their_bits(tmp_path):
    one, other = Many(0), Many(1)
    parts, loaded = model_parts([one], 0), model_parts([other], 0)
    assert [part.name for part in parts] == [*DTYPES, "scalar", "frozen"] and parts.keys() == loaded.keys()
    folder = str(tmp_path / "step_1")
    save(folder, list(parts), lambda part: parts[part].asnumpy(), {}, files=QuickFiles())
    assert any(bits(parts[part]) != bits(loaded[part]) for part in parts)
    load(open_checkpoint(folder), list(loaded), lambda part, array: fill_parameter(loaded[part], array))
    for part, parameter in parts.items():
        assert bits(parameter) == bits(loaded[part]), part
        assert loaded[part].dtype == parameter.dtype and loaded[part].shape == parameter.shape
    with safe_open(tmp_path / "step_1/model-00001-of-00001.safetensors", "np") as file:
        assert file.get_slice("bfloat16").get_dtype() == "BF16"
        np.testing.assert_array_equal(file.get_tensor("int64"), one.int64.asnumpy())


@pytest.mark.parametrize("optimizer", [AdamW, Lamb])
def test_moments_are_called_as_their_parameters(optimizer):
    net = nn.CellDict({"a": nn.Dense(4, 3), "b": nn.Dense(3, 2, has_bias=False)})
    made, prefix = optimizer(net.trainable_params()), optimizer(net.trainable_params()).moments1[0].name.split(".")[0]
    found = optimizer_parts(made, 0, [("*", (FileTensor("their.*"),))])
    names = [f"{prefix}.{moment}.their.{path}" for moment in ("moment1", "moment2") for path in
             ("a.weight", "a.bias", "b.weight")]  # fmt: skip
    names += ["global_step"] * isinstance(made, Lamb)
    parts = {part.name: state for part, state in found.items()}
    assert sorted(parts) == sorted(names) and {part.group for part in found} == {"optimizer"}
    assert [id(parts[name]) for name in names[:6]] == list(map(id, (*made.moments1, *made.moments2)))


def test_a_tied_weight_is_one_tensor():
    one, other = nn.Dense(4, 3), nn.Dense(4, 3)
    other.weight = one.weight
    assert [part.name for part in model_parts([one, other], 0)] == ["weight", "bias"]
