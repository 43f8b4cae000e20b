"""Buckets: the tensors that one collective communicates. Pure Python.

Few large collectives cost less than many small ones. Gradients are bucketed in the order of a backward pass, weights in
that of a forward pass, after the gradient buckets of PyTorch DDP (Li et al. 2020) and MindSpore's `comm_fusion`.
"""

from dataclasses import dataclass

from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.hints import nearest

AUTO_MEGABYTES = 64
KINDS = ("allreduce", "allgather", "reducescatter")
_MODES = ("auto", "size", "index")
_KEYS = ("mode", "config")
_MOST_MB = 2**30


@dataclass(frozen=True)
class Fusion:
    """The size of buckets.

    Attributes:
        megabytes: size at which a bucket is full (1 MB is 2**20 bytes); 0: one tensor a bucket; None: see `places`.
        places: counts of parameters, ascending: the first bucket ends before parameter `places[0]`, the next one before
            `places[1]`, ….
    """

    megabytes: float | None = AUTO_MEGABYTES
    places: tuple = ()


@dataclass(frozen=True)
class Bucket:
    """The tensors of one collective.

    Attributes:
        kind: one of `KINDS`.
        members: numbers of the parameters, in the order of the buffer.
        unit: path of the Cell of the parameters; "" for none.
        dtype: name of the buffer's dtype.
        size: number of elements, of unsharded tensors.
    """

    kind: str
    members: tuple
    unit: str
    dtype: str
    size: int


def parse_comm_fusion(given):
    """Parse the argument `comm_fusion` of `hsdp()`.

    Args:
        given: `"auto"`: buckets of 64 MB; a number: of as many MB; `{"mode": "auto" | "size" | "index", "config": …}`,
            where `config` is None, the number of MB, or ascending counts of parameters at which buckets end, such as
            `[20, 35]`; or a dict of such settings by kind, as `set_auto_parallel_context(comm_fusion=…)` takes them,
            where missing kinds are `"auto"`.

    Returns:
        The `Fusion` of every kind of collective, a dict with the keys `KINDS`.

    Raises:
        TypeError, ValueError: anything else; names the key.
    """
    if isinstance(given, dict) and not set(given) & set(_KEYS):
        for kind in given:
            if kind not in KINDS:
                raise ValueError(
                    f"comm_fusion: unknown key {kind!r}: choose of {', '.join(KINDS)}, or {' and '.join(_KEYS)}"
                    f"{nearest(str(kind), (*KINDS, *_KEYS))}"
                )
        return {kind: _fusion(given.get(kind, "auto"), f"comm_fusion.{kind}") for kind in KINDS}
    return dict.fromkeys(KINDS, _fusion(given, "comm_fusion"))


def _fusion(given, where):
    expected = f"{where}: {given!r} should be 'auto', a number of MB, or a dict with {' and '.join(_KEYS)}"
    if _is_number(given):
        return _fusion_of_size(given, where)
    if given == "auto":
        given = {"mode": "auto"}
    if isinstance(given, str):
        raise ValueError(expected + nearest(given, ("auto",)))
    if not isinstance(given, dict):
        raise TypeError(expected)
    for key in given:
        if key not in _KEYS:
            raise ValueError(f"{where}: unknown key {key!r}: it has {' and '.join(_KEYS)}{nearest(str(key), _KEYS)}")
    mode, config = given.get("mode"), given.get("config")
    if mode not in _MODES:
        raise ValueError(f"{where}.mode: {mode!r} should be {', '.join(_MODES)}{nearest(str(mode), _MODES)}")
    where = f"{where}.config"
    if mode == "index":
        return _fusion_of_places(config, where)
    if mode == "size":
        if not _is_number(config):
            raise TypeError(f"{where}: {config!r} should be a number of MB in mode size")
        return _fusion_of_size(config, where)
    if config is not None:
        raise ValueError(f"{where}: {config!r} should be left out in mode auto: use mode size or index")
    return Fusion()


def _is_number(given):
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def _fusion_of_size(number, where):
    if not 0 <= number <= _MOST_MB:
        raise ValueError(f"{where}: {number} MB should be at least 0 (0: every tensor by itself), at most {_MOST_MB}")
    return Fusion(number)


def _fusion_of_places(config, where):
    if not isinstance(config, (list, tuple)) or not all(type(place) is int for place in config):
        raise TypeError(f"{where}: {config!r} should be a list of counts of parameters in mode index, such as [20, 35]")
    if any(one >= other for one, other in zip((0, *config), config)):
        raise ValueError(f"{where}: {list(config)} should ascend from at least 1")
    return Fusion(None, tuple(config))


def make_buckets(kind, plans, members, fusion, dtype_of):
    """Bucket parameters, in the given order.

    A bucket holds parameters of one unit, one dtype and one `cut`. Buckets of several dtypes are open at the same time.

    Args:
        kind: one of `KINDS`.
        plans: all `ParameterPlan`s.
        members: the numbers of the parameters to bucket, in the order of the pass.
        fusion: a `Fusion`; its `places` count the parameters of `plans`.
        dtype_of: function of a plan: the name of the buffer's dtype.

    Returns:
        A list of `Bucket`s, in the order in which they are complete.
    """
    opened, groups = {}, []
    for number in members:
        plan = plans[number]
        key = plan.unit, dtype_of(plan), plan.cut, sum(number >= place for place in fusion.places)
        if key not in opened:
            opened[key] = []
            groups.append((key, opened[key]))
        opened[key].append(number)
        held = sum(plans[other].size for other in opened[key]) * ITEM_BYTES[key[1]]
        if fusion.megabytes is not None and held >= fusion.megabytes * 2**20:
            del opened[key]
    order = {number: place for place, number in enumerate(members)}
    groups.sort(key=lambda group: order[group[1][-1]])
    return [
        Bucket(kind, tuple(numbers), unit, dtype, sum(plans[number].size for number in numbers))
        for (unit, dtype, *_), numbers in groups
    ]
