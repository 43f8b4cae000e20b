"""Parameters of a process as parts of checkpoints: dtypes, names, tied weights, moments; a Cell outside of training."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from safetensors import safe_open
from support.checkpoint_states import QuickFiles

from mindformers_core.checkpoint.load import load, open_checkpoint
from mindformers_core.checkpoint.save import save
from mindformers_core.checkpoint.tensors import fill_parameter, model_parts, optimizer_parts
from mindformers_core.optimizers.adamw import AdamW
from mindformers_core.optimizers.lamb import Lamb
from mindformers_core.trainer.recipe import Optimizer

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


@pytest.mark.parametrize("optimizer", [lambda found: AdamW(found, Optimizer()), Lamb])
def test_moments_are_called_as_their_parameters(optimizer):
    net = nn.CellDict({"a": nn.Dense(4, 3), "b": nn.Dense(3, 2, has_bias=False)})
    made, prefix = optimizer(net.trainable_params()), optimizer(net.trainable_params()).moments1[0].name.split(".")[0]
    found = optimizer_parts(made, 0, lambda path: f"their.{path}")
    names = [f"{prefix}.{moment}.their.{path}" for moment in ("moment1", "moment2") for path in
             ("a.weight", "a.bias", "b.weight")]  # fmt: skip
    names += ["global_step", "learning_rate"] * isinstance(made, Lamb)
    parts = {part.name: state for part, state in found.items()}
    assert sorted(parts) == sorted(names) and {part.group for part in found} == {"optimizer"}
    assert [id(parts[name]) for name in names[:6]] == list(map(id, (*made.moments1, *made.moments2)))


def test_a_tied_weight_is_one_tensor():
    one, other = nn.Dense(4, 3), nn.Dense(4, 3)
    other.weight = one.weight
    assert [part.name for part in model_parts([one, other], 0)] == ["weight", "bias"]
