"""Faults that `verify()` has to find: those of `verify_faults.yaml`, planted in this process one at a time.

A fault is another text of one function of the package. Its code takes the place of the function's: whoever holds the
function calls it then. Memos of functions are emptied before and after, so that no result of other code remains.
"""

import functools
import gc
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, FunctionType

import numpy as np
import yaml
from mindspore import Tensor, mint, nn, ops
from models.example import axes_of, columns, rows
from mutate import Fault
from support import recomputed_models
from support.launch import ROOT
from support.random_steps import TINY, Tower, check_example
from support.routed_layer import Case
from support.small_zero import Net, array

from mindformers_core import recompute, shard, verify
from mindformers_core.commands.verifying import verify_recipe
from mindformers_core.layout import layout
from mindformers_core.mesh import DeviceMesh
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import MESH_AXES, mesh_shape
from mindformers_core.redistribution import DeviceModel, Link
from mindformers_core.tensor_parallel.attention import attention
from mindformers_core.zero import MixedPrecision, hsdp

__all__ = ["SUBJECTS", "PlantedFault", "outcome", "read_faults"]


# of which nothing is worth computing on all ranks, as at the sizes that models are trained in
LARGE = DeviceModel("large", 1e6, 0.0, Link(0.0, 1e12))


class Classes(nn.Cell):
    """Layers whose norm, softmax and loss are over dims that are cut, and classes whose weights differ."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Dense(8, 16, weight_init=Tensor(array(16, 8))), nn.LayerNorm((16,))
        self.down = mint.nn.Linear(16, 5, weight_init=Tensor(array(5, 16)), bias_init=Tensor(array(5)))
        self.head = nn.Dense(5, 8, weight_init=Tensor(array(8, 5)))
        self.loss, self.shares = ops.NLLLoss(), Tensor(np.linspace(0.1, 2.0, 8).astype(np.float32))

    def construct(self, x, labels):
        logits = self.head(self.down(ops.tanh(self.norm(self.up(x)))))
        return self.loss(ops.log_softmax(logits, 1), labels, self.shares)[0]


class Passed(nn.Cell):
    def construct(self, x):
        return ops.tanh(x)


class Drawn(nn.Cell):
    """Two dropouts, deviations and maxima over a dim that is cut, and a Cell that takes another layout."""

    def __init__(self):
        super().__init__()
        self.up, self.drop, self.passed = nn.Dense(8, 8, weight_init=Tensor(array(8, 8))), nn.Dropout(p=0.4), Passed()

    def construct(self, x):
        x = self.up(x)
        y = self.passed(self.drop(x))
        drawn = ops.square(ops.dropout(y, 0.3, self.training)).mean()
        return drawn + ops.std(x, 1, 1, True).mean() + ops.amax(x, 1).mean()


class Attending(nn.Cell):
    """Causal attention."""

    def __init__(self, algorithm):
        super().__init__()
        self.known = 0.5, (0,), (None, 0), True, algorithm

    def construct(self, query, key, value, places):
        return attention(query * 2, key * 2, value * 2, places * 0, places + 1, places, *self.known)


@dataclass(frozen=True)
class PlantedFault(Fault):
    """An entry of `verify_faults.yaml`: a fault, what is verified, and the words that its report has to contain."""

    subject: str = ""
    report: tuple = ()


def read_faults(name="verify_faults.yaml"):
    """All `PlantedFault`s of a file beside this one, in order."""
    return [PlantedFault(**entry) for entry in yaml.safe_load((ROOT / "tests" / name).read_text())]


def codes(code, where=()):
    """(names of the functions around it, number among those of equal names) -> code object of a function."""
    found = {}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            place = (
                *where,
                each.co_name,
                sum(key[-2:-1] == (each.co_name,) for key in found if len(key) == len(where) + 2),
            )
            found |= {place: each, **codes(each, place)}
    return found


@contextmanager
def planted(fault):
    """While open, functions of the fault's file have the fault's code."""
    path = ROOT / "mindformers_core" / fault.file
    import_module(f"mindformers_core.{fault.file.removesuffix('.py').replace('/', '.')}")  # if nobody has yet
    whole = path.read_text()
    before, after = (codes(compile(text, str(path), "exec")) for text in (whole, fault.planted(whole)))
    changed = {code: after[place] for place, code in before.items() if place in after and after[place] != code}
    gc.unfreeze()  # what tests before had frozen isn't listed
    functions = [each for each in gc.get_objects() if type(each) is FunctionType and each.__code__ in changed]
    assert functions, f"{fault.name} changes no function that is in use"
    forget_results()
    try:
        for function in functions:
            function.__code__ = changed[function.__code__]
        yield
    finally:
        back = {other: one for one, other in changed.items()}
        for function in functions:
            function.__code__ = back[function.__code__]
        forget_results()


def forget_results():
    """Empty the memos of the package's functions."""
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith("mindformers_core"):
            each.cache_clear()


def outcome(subject, fault=None):
    """The report of a subject with a fault in the package, or the error; empty where nothing was found."""
    if fault is None:
        check, _ = SUBJECTS[subject]()
        return check.report() if check.faults else ""
    with planted(fault):
        try:
            return outcome(subject)
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def recipe(*overrides):
    """Verify a recipe of a Llama of two layers; overrides without a section are of `parallelism`."""
    given = [each if "." in each.partition("=")[0] else f"parallelism.{each}" for each in overrides]
    given = load_recipe(str(ROOT / "configs/llama_tiny_pp.yaml"), [*TINY, "model.num_hidden_layers=2", *given])
    return verify_recipe(given, full=True), DeviceMesh(mesh_shape(given), MESH_AXES)


def model(name, shape, axes):
    """Verify a model of `models`."""
    return check_example(name, DeviceMesh(shape, axes))


def data_parallel(dp, **settings):
    """Verify a `Tower` under `hsdp()`, of which every rank computes a loss of its own."""
    mesh = DeviceMesh((dp,), ("dp",))
    ids, keep = np.arange(8 * dp, dtype=np.int32).reshape(2 * dp, 4) % 16, array(2 * dp, 4, 8) < 0.6

    def build():
        return hsdp(Tower(np.random.default_rng(0), 3), mesh=mesh, **{"threshold": 0, **settings})

    return verify(build, mesh, Tensor(ids), Tensor(keep)), mesh


def tensor_parallel(recomputed=None, **settings):
    """Verify a `Net` on 2 x 2 ranks, whose weights are cut over columns, then rows."""
    mesh = DeviceMesh((2, 2), ("dp", "tp"))

    def build():
        net = shard(Net(layout(None, "tp"), layout("tp", None)), mesh, plan={"": {"input": {"x": layout("dp")}}})
        net = recompute(net, **recomputed) if recomputed else net
        return hsdp(net, **{"threshold": 0, **settings}) if settings else net

    return verify(build, mesh, Tensor(array(8, 8))), mesh


def blocks():
    """Verify recomputed blocks, in which an operator has two results of one shape, on 2 ranks."""
    mesh = DeviceMesh((2,), ("dp",))

    def build():
        net = recomputed_models.drawn(recomputed_models.Net())
        return recompute(shard(net, mesh, plan={"": {"input": {"x": layout("dp")}}}), select="*.Split")

    return verify(build, mesh, Tensor(array(4, 8))), mesh


def classes(**settings):
    """Verify `Classes` on 2 x 2 ranks."""
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    axes = axes_of(mesh)
    plan = {"": {"input": {name: layout("dp") for name in ("x", "labels")}}, "up": columns(axes)}
    plan |= {"down": rows(axes), "head": columns(axes) | {"input": {"x": layout("dp")}}}

    def build():
        net = shard(Classes(), mesh, plan=plan, device_model=LARGE)
        return hsdp(net, **{"threshold": 0, **settings}) if settings else net

    return verify(build, mesh, Tensor(array(8, 8)), Tensor(np.arange(8, dtype=np.int32))), mesh


def attending(algorithm):
    """Verify an `Attending` on 3 ranks; all dims are of one size, so that a wrong one would fit."""
    mesh, places = DeviceMesh((3,), ("cp",)), np.arange(3, dtype=np.int32)[None]
    plan = {"": {"input": dict.fromkeys(("query", "key", "value", "places"), layout(None, "cp"))}}
    given = *(array(3, 3, 3, 3, seed=seed) for seed in range(3)), places
    return verify(Attending(algorithm), mesh, *map(Tensor, given), plan=plan), mesh


def drawn():
    """Verify `Drawn` on 2 x 2 ranks."""
    mesh = DeviceMesh((2, 2), ("dp", "tp"))
    plan = {"": {"input": {"x": layout("dp")}}, "up": columns(axes_of(mesh))}
    plan["passed"] = {"input": {"x": layout(("dp", "tp"), None)}}

    def build():
        return shard(Drawn().set_train(), mesh, plan=plan, device_model=LARGE)

    return verify(build, mesh, Tensor(array(8, 8))), mesh


def routed(case, ties=False, recomputed=False):
    """Verify a step of a layer of experts; `ties`: the first two experts get all tokens."""
    mesh, x = case.mesh, Tensor(array(*case.shape, seed=3) * (not ties))
    return verify(lambda: case.build(mesh, recomputed=recomputed), mesh, x), mesh


_EXPERTS = {
    "one axis": Case("dp2", ("dp", None), ("dp",), zero={"shard_size": 2}),
    "folded": Case("dp2 tp2", ("dp", None), ("dp",), ("tp",), {"shard_size": 2}),
    "alone": Case("dp2 tp2", ("dp", None), ("tp",)),
    "two axes": Case("dp2 cp2", ("dp", "cp"), ("cp", "dp"), scores="sigmoid"),
    "replicas": Case("dp2 cp2", ("dp", "cp"), ("cp",), zero={"shard_size": 4, "optimizer_level": "level3"}),
    "mixed": Case("dp2 tp2", ("dp", None), ("tp", "dp")),
    "capacity": Case("dp2", ("dp", None), ("dp",), capacity=(1, 4)),
    "capacity over cp": Case("cp2", (None, "cp"), ("cp",), capacity=(1, 4)),
}
_FLAT = ("pipeline_parallel=1",)
_STAGES = ("data_parallel_shard=1", "tensor_parallel=1", "sequence_parallel=false", "training.global_batch_size=4")
_TWO_STAGES = ("pipeline_parallel_interleave_num=2", "model.num_hidden_layers=4")
SUBJECTS = {
    **{f"experts, {name}": functools.partial(routed, case) for name, case in _EXPERTS.items()},
    "experts, ties": lambda: routed(_EXPERTS["one axis"], ties=True),
    "experts, recomputed": lambda: routed(_EXPERTS["one axis"], recomputed=True),
    "net": tensor_parallel,
    "net, zero 2": lambda: tensor_parallel(shard_size=2, optimizer_level="level2", accumulate_grad_step=2),
    "net, zero 3, recomputed": lambda: tensor_parallel({"select": ["first"]}, shard_size=2, optimizer_level="level3"),
    "data parallel": lambda: data_parallel(2),
    "zero 1": lambda: data_parallel(2, shard_size=2, accumulate_grad_step=2),
    "zero 2, replicas": lambda: data_parallel(4, shard_size=2, optimizer_level="level2"),
    "zero 2, small buckets": lambda: data_parallel(
        2, shard_size=2, optimizer_level="level2", comm_fusion=0.0002, accumulate_grad_step=3
    ),
    "zero 3": lambda: data_parallel(2, shard_size=2, optimizer_level="level3", accumulate_grad_step=2),
    "zero 3, mixed": lambda: data_parallel(
        2, shard_size=2, optimizer_level="level3", mixed_precision=MixedPrecision(compute="float16")
    ),
    "drawn": drawn,
    **{f"attention, {each}": functools.partial(attending, each) for each in ("gather", "ring", "all_to_all")},
    "blocks, recomputed": blocks,
    "classes": classes,
    "classes, zero 2": lambda: classes(shard_size=2, optimizer_level="level2"),
    "llama": lambda: recipe(*_FLAT),
    "llama, eager": lambda: recipe(*_FLAT, "context.engine=eager"),
    "llama, tp": lambda: recipe(*_FLAT, "sequence_parallel=false"),
    "llama, recomputed": lambda: recipe(*_FLAT, "recompute.full=true", "zero_level=2", "zero_threshold_kb=0"),
    "stages": lambda: recipe(*_STAGES),
    "stages, zb_h1": lambda: recipe(*_STAGES, "pipeline_parallel_schedule=zb_h1"),
    "stages, zb_v": lambda: recipe(*_STAGES, *_TWO_STAGES, "pipeline_parallel_schedule=zb_v"),
    "stages, interleaved": lambda: recipe(*_STAGES, *_TWO_STAGES, "pipeline_parallel_schedule=interleaved_1f1b"),
    "stages, two runs": lambda: recipe(*_STAGES, "training.global_batch_size=8", "model.tie_word_embeddings=false"),
    **{
        name: functools.partial(model, name, (2, 2), ("dp", "tp")) for name in ("mlp", "heads", "experts", "two towers")
    },
    "towers on tp": functools.partial(model, "two towers", (4,), ("tp",)),
    "llama on cp": functools.partial(model, "llama", (2, 2), ("cp", "tp")),
    "language model on cp": functools.partial(model, "tied language model", (2, 2), ("cp", "tp")),
    "encoder": functools.partial(model, "encoder", (2, 2), ("dp", "tp")),
    "recurrent": functools.partial(model, "recurrent", (2, 2), ("dp", "tp")),
}
