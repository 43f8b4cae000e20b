"""Which tensors are communicated together. Pure Python.

Few large collectives cost less than many small ones. A bucket is what goes into one: gradients in the order in which a
backward pass gives them, weights in that in which a forward pass needs them (PyTorch DDP, Li et al. 2020, after whose
gradient buckets these are made; MindSpore's `comm_fusion` gives the ways to choose them).
"""

from dataclasses import dataclass

from mindformers_core.hints import nearest

__all__ = ["AUTO_MEGABYTES", "Bucket", "Fusion", "KINDS", "make_buckets", "parse_comm_fusion"]

AUTO_MEGABYTES = 64
KINDS = ("allreduce", "allgather", "reducescatter")
_MODES = ("auto", "size", "index")
_KEYS = ("mode", "config")
_MOST_MB = 2**30


@dataclass(frozen=True)
class Fusion:
    """How tensors are put together.

    Attributes:
        megabytes: a bucket is full as soon as it has as many (1 MB is 2**20 bytes); 0: one tensor each; None where
            `places` decide.
        places: counts of parameters, ascending: the first bucket ends before parameter `places[0]`, the next one before
            `places[1]`, ….
    """

    megabytes: float | None = AUTO_MEGABYTES
    places: tuple = ()


@dataclass(frozen=True)
class Bucket:
    """What one collective moves.

    Attributes:
        kind: one of `KINDS`.
        members: numbers of its parameters, in the order in which they lie in the buffer.
        unit: path of the Cell whose parameters they are.
        dtype: name of the dtype that moves.
        size: number of elements, of whole tensors.
    """

    kind: str
    members: tuple
    unit: str
    dtype: str
    size: int


def parse_comm_fusion(given):
    """The `Fusion` of every kind of collective, a dict with the keys `KINDS`.

    Args:
        given: `"auto"`: buckets of 64 MB; a number: of as many MB; `{"mode": "auto" | "size" | "index", "config": …}`,
            where `config` is None, the number of MB, or ascending counts of parameters at which buckets end, such as
            `[20, 35]`; or a dict of such settings by kind, as `set_auto_parallel_context(comm_fusion=…)` takes them:
            kinds that it leaves out are `"auto"`.

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
    if isinstance(given, str):
        if given != "auto":
            raise ValueError(
                f"{where}: {given!r} should be 'auto', a number of MB, or a dict with {' and '.join(_KEYS)}"
                f"{nearest(given, ('auto',))}"
            )
        return Fusion()
    if _is_number(given):
        return Fusion(_megabytes(given, where))
    if not isinstance(given, dict):
        raise TypeError(f"{where}: {given!r} should be 'auto', a number of MB, or a dict with {' and '.join(_KEYS)}")
    for key in given:
        if key not in _KEYS:
            raise ValueError(f"{where}: unknown key {key!r}: it has {' and '.join(_KEYS)}{nearest(str(key), _KEYS)}")
    mode, config = given.get("mode"), given.get("config")
    if mode not in _MODES:
        raise ValueError(f"{where}.mode: {mode!r} should be {', '.join(_MODES)}{nearest(str(mode), _MODES)}")
    if mode == "auto":
        if config is not None:
            raise ValueError(f"{where}.config: {config!r} should be left out in mode auto: use mode size or index")
        return Fusion()
    if mode == "size":
        if not _is_number(config):
            raise TypeError(f"{where}.config: {config!r} should be a number of MB in mode size")
        return Fusion(_megabytes(config, f"{where}.config"))
    return Fusion(None, _places(config, f"{where}.config"))


def _is_number(given):
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def _megabytes(number, where):
    if not 0 <= number <= _MOST_MB:
        raise ValueError(f"{where}: {number} MB should be at least 0 (0: every tensor by itself), at most {_MOST_MB}")
    return number


def _places(config, where):
    if not isinstance(config, (list, tuple)) or not all(type(place) is int for place in config):
        raise TypeError(f"{where}: {config!r} should be a list of counts of parameters in mode index, such as [20, 35]")
    if any(one >= other for one, other in zip((0, *config), config)):
        raise ValueError(f"{where}: {list(config)} should ascend from at least 1")
    return tuple(config)


def make_buckets(kind, plans, members, fusion, dtype_of, item_bytes):
    """Put parameters together, in the given order.

    A bucket holds parameters of one unit and one dtype. Those of another dtype go into a bucket of their own that
    stays open beside it.

    Args:
        kind: one of `KINDS`.
        plans: all `ParameterPlan`s.
        members: the numbers of those to put together, in the order in which their tensors come, or are needed.
        fusion: a `Fusion`; its `places` count the parameters of `plans`.
        dtype_of: function of a plan: the name of the dtype that moves.
        item_bytes: name of a dtype -> bytes of an element.

    Returns:
        A list of `Bucket`s, in the order in which they are complete.
    """
    opened, buckets = {}, []

    def close(key):
        numbers = opened.pop(key)
        unit, dtype, _ = key
        buckets.append(Bucket(kind, tuple(numbers), unit, dtype, sum(plans[number].size for number in numbers)))

    for number in members:
        plan = plans[number]
        dtype = dtype_of(plan)
        part = sum(number >= place for place in fusion.places)
        key = plan.unit, dtype, part
        opened.setdefault(key, []).append(number)
        held = sum(plans[other].size for other in opened[key]) * item_bytes[dtype]
        if fusion.megabytes is not None and held >= fusion.megabytes * 2**20:
            close(key)
    last = {number: place for place, number in enumerate(members)}
    for key in list(opened):
        close(key)
    return sorted(buckets, key=lambda bucket: last[bucket.members[-1]])
