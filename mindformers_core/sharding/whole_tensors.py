"""Functions and optimizers of MindSpore that compute with whole tensors: an error where they get this rank's parts.

Gradients and Parameters of a sharded Cell are plain tensors of local shape. A norm of such a part differs from rank to
rank, and so would the weights that all ranks should have alike. Gradients carry no mark, so they are told by their
shapes: those of the trained Parameters of a tree that is in use.
"""

import gc
from functools import wraps
from itertools import takewhile
from weakref import WeakKeyDictionary

from mindspore import Parameter, Tensor, nn

from mindformers_core.algorithms.compiled import ConstantOfPython
from mindformers_core.communication.world import process_state
from mindformers_core.mindspore_private import ALL_FINITE, CLIP_BY_GLOBAL_NORM, TOTAL_NORM
from mindformers_core.program.structure import tree_leaves
from mindformers_core.scopes import entered, once

# classes whose step takes norms, means or matrices of a tensor, by the algorithm's name: own ones are alike
_BY_TENSOR = frozenset({
    "lamb", "lars", "adafactor", "came", "muon", "shampoo", "soap", "galore", "sm3", "thorascend", "thorgpu",
    "adasumbygradwrapcell", "adasumbydeltaweightwrapcell",
})  # fmt: skip
_CLIP = "mindformers_core.tensor_parallel.clip_by_global_norm(gradients, parameters, max_norm, …)"
_FINITE = "mindformers_core.zero.all_finite(mesh, gradients)"


def note_owner(owner):
    """Record a `ShardedTree`, or a `PipelineStage` among others, so that gradients of its Parameters are known.

    A norm of several gradients of such a stage is not that of the whole model.
    """
    _check_always()
    _owners()[owner] = None


def of_this_rank():
    """While open, nothing is an error: the caller makes one result of those of all ranks."""
    return entered(process_state().memo(__name__), "is_open", True)


def _owners():
    """The owners of Parameters, as keys in their order."""
    return process_state().memo(__name__).setdefault("owners", WeakKeyDictionary())


def _part_among(shapes):
    """What is known of a part among tensors of these shapes, if they are gradients of an owner's; else None."""
    for owner in list(_owners()):
        is_stage = hasattr(owner, "stage_num")
        trained = owner.parameters if is_stage else owner.cells[""].trainable_params()
        parts = [each for each in trained if tuple(each.shape) in shapes and (is_stage or is_part(each))]
        if parts and len(shapes) > is_stage and {tuple(each.shape) for each in trained}.issuperset(shapes):
            if is_stage:
                return f"{owner.label}, one of {owner.stage_num}"
            return f"{described_part(max(parts, key=lambda part: tuple(part.shape)))}, in {owner.label('')}"
    return None


def is_part(parameter):
    """Whether a Parameter is this rank's part of a larger one."""
    return tuple(getattr(parameter, "global_shape", parameter.shape)) != tuple(parameter.shape)


def described_part(parameter):
    """A Parameter that is a part, in words."""
    whole, part = tuple(parameter.global_shape), tuple(parameter.shape)
    return f"'{parameter.name}', {whole}, of which this rank has the part {part}, {parameter.layout}"


class _CheckWhole(ConstantOfPython):
    """True, or an error where tensors are gradients of parts. Compiled functions call it while types are inferred."""

    def __call__(self, function, tensors):
        leaves = tree_leaves(tensors, Tensor)
        if all(type(leaf) in (Tensor, Parameter) for leaf in leaves):  # not those of a sharded Cell's construct
            self._check(function, [tuple(leaf.shape) for leaf in leaves])
        return True

    def __infer__(self, function, tensors):
        self._check(function["value"], _shapes(tensors["shape"]))
        return {"dtype": None, "shape": None, "value": True}

    def _check(self, function, shapes):
        if process_state().memo(__name__).get("is_open") or not _part_among(shapes):
            return
        gc.collect()  # trees that nobody has any more may only wait for it
        if part := _part_among(shapes):
            cure = _FINITE if function == "amp.all_finite" else _CLIP
            raise ValueError(
                f"{function} computes with what this rank has, and these tensors have the shapes of gradients of "
                f"{part}: use {cure}, which asks all ranks"
            )


def _shapes(shape):
    """The shapes in what MindSpore infers as the shape of one tensor, or of nested ones."""
    is_one = all(isinstance(size, int) for size in shape)
    return [tuple(shape)] if is_one else [inner for each in shape for inner in _shapes(each)]


check_whole = _CheckWhole()
_total_norm, _all_finite = getattr(*TOTAL_NORM), getattr(*ALL_FINITE)


class _ClipByGlobalNorm(getattr(*CLIP_BY_GLOBAL_NORM)):
    def construct(self, x):
        return super().construct(x) if check_whole("ops.clip_by_global_norm", x) else x


def _checked_total_norm(x, norm_type):
    return _total_norm(x, norm_type) if check_whole("ops.clip_by_norm", x) else x


def _checked_clip_by_norm(self, x, clip_norm):
    return self.clip_by_norm(x, clip_norm) if check_whole("nn.ClipByNorm", x) else x


def _checked_all_finite(inputs, check_overflow_mode, enable_allfinite):
    is_whole = check_whole("amp.all_finite", inputs)
    return _all_finite(inputs, check_overflow_mode, enable_allfinite) if is_whole else inputs


def check_optimizer(optimizer):
    """Raise `ValueError` for an optimizer that holds parts, and computes with norms or means of whole tensors."""
    classes = takewhile(lambda kind: not kind.__module__.startswith("mindformers_core."), type(optimizer).__mro__)
    name, parts = type(optimizer).__name__, [parameter for parameter in optimizer.parameters if is_part(parameter)]
    flags = zip(optimizer.parameters, getattr(optimizer, "grad_centralization_flags", ()))
    cut_rows = [p for p, flag in flags if flag and is_part(p) and tuple(p.global_shape[1:]) != tuple(p.shape[1:])]
    if parts and any(kind.__name__.lower() in _BY_TENSOR for kind in classes):
        raise ValueError(
            f"{name} computes a step from whole tensors, but holds {described_part(parts[0])}: use "
            "mindformers_core.zero.Lamb, whose norms are taken across ranks, or an optimizer that updates element by "
            "element, such as nn.AdamWeightDecay"
        )
    if cut_rows:
        raise ValueError(
            f"{name} has a group with grad_centralization=True, means over whole rows, but holds "
            f"{described_part(cut_rows[0])}: leave grad_centralization out"
        )


def _checked(init):
    @wraps(init)
    def checked(self, *args, **kwargs):
        init(self, *args, **kwargs)
        check_optimizer(self)

    return checked


@once
def _check_always():
    """Have MindSpore check, where it looks names up at every call: also those that were imported before."""
    setattr(*CLIP_BY_GLOBAL_NORM, _ClipByGlobalNorm)
    setattr(*TOTAL_NORM, _checked_total_norm)
    setattr(*ALL_FINITE, _checked_all_finite)
    nn.ClipByNorm.construct = _checked_clip_by_norm
    for kind in (nn.Optimizer, nn.LARS, nn.AdaSumByGradWrapCell, nn.AdaSumByDeltaWeightWrapCell):
        kind.__init__ = _checked(kind.__init__)
