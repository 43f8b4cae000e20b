"""Device models as texts with units: `{"launch": "20 us", "link": {"latency": "3 us", "bandwidth": "196 GB/s"}}`."""

import os
import re

import yaml

from mindformers_core.hints import nearest
from mindformers_core.redistribution.device_model import NAMED, DeviceModel, Link
from mindformers_core.scopes import errors_at

_PREFIXES = {"n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_LINK = {"latency": "s", "bandwidth": "B/s"}
_UNITS = {  # attribute of a `DeviceModel` -> its unit, or those of its parts
    "operations_per_second": "FLOP/s", "launch": "s", "operator_launch": "s", "memory": "B", "memory_bandwidth": "B/s",
    "link": _LINK, "host": _LINK,
}  # fmt: skip
_KEYS = ("name", "backend", *_UNITS, "levels", "axes")
_NEEDED = ("operations_per_second", "launch", "link")


def device_model_of(data):
    """The `DeviceModel` of a dict as a YAML file gives it.

    Args:
        data: keys are the attributes of a `DeviceModel`, and `axes` (name of a mesh axis -> its link); quantities are
            texts of a number and a unit with a prefix (`"20 us"`, `"64 GB"`, `"200 GiB/s"`, `"354 TFLOP/s"`). `levels`
            is a list of links with `ranks`. Needed are `operations_per_second`, `launch` and `link`.

    Raises:
        TypeError, ValueError: a key, a number or a unit that isn't one, a missing key; names its path.
    """
    _check_keys(data, _KEYS, _NEEDED, "a device model")
    values = {key: _of_units(data[key], unit, key) for key, unit in _UNITS.items() if key in data}
    levels = []
    for number, level in enumerate(data.get("levels", ())):
        where = f"levels[{number}]"
        _check_keys(level, ("ranks", *_LINK), ("ranks", *_LINK), where)
        if type(level["ranks"]) is not int or level["ranks"] < 1:
            raise ValueError(f"{where}.ranks: {level['ranks']!r} is no number of consecutive ranks")
        levels.append((level["ranks"], _of_units({key: level[key] for key in _LINK}, _LINK, where)))
    axes = data.get("axes", {})
    _check_keys(axes, axes, (), "axes")
    links = {axis: _of_units(link, _LINK, f"axes.{axis}") for axis, link in axes.items()}
    values["backend"] = str(data.get("backend", "native"))
    return DeviceModel(str(data.get("name", "custom")), **values, levels=tuple(levels)).with_links(**links)


def named_device_model(name):
    """The `DeviceModel` of a name, `"CPU"`, `"GPU"` or `"Ascend"`, or of a YAML file, see `device_model_of`.

    Raises:
        ValueError: neither a name nor a file; a file that isn't YAML, or that `device_model_of` doesn't take.
        TypeError: as of `device_model_of`.
    """
    if name in NAMED:
        return NAMED[name]
    if not os.path.isfile(name):
        raise ValueError(f"{name!r} is neither a file nor one of {', '.join(NAMED)}{nearest(name, NAMED)}")
    with open(name, encoding="utf-8") as file, errors_at(f"{name}: ", kinds=(TypeError, ValueError, yaml.YAMLError)):
        return device_model_of(yaml.safe_load(file))


def _of_units(value, unit, where):
    """A quantity in its unit, or the `Link` of two."""
    if isinstance(unit, dict):
        _check_keys(value, unit, unit, where)
        return Link(**{key: _of_units(value[key], each, f"{where}.{key}") for key, each in unit.items()})
    found = re.fullmatch(rf"\s*([0-9.eE+-]+)\s*([a-zA-Zµ]?)(i?){unit}\s*", str(value))
    with errors_at(f"{where}: {value!r} is no quantity, such as '20 {unit}' or '1.5 G{unit}': "):
        if found is None or found[2] not in _PREFIXES:
            raise ValueError(f"the unit is {unit}, with one of the prefixes {', '.join(filter(None, _PREFIXES))}")
        prefix = _PREFIXES[found[2]]
        return float(found[1]) * (1024 ** ("kMGTP".index(found[2]) + 1) if found[3] and prefix > 1 else prefix)


def _check_keys(data, known, needed, where):
    if not isinstance(data, dict):
        raise TypeError(f"{where}: {data!r} is no mapping, with keys such as {', '.join(map(str, known))}")
    for key in data:
        if key not in known:
            raise ValueError(f"{where} has no key '{key}'{nearest(key, known)}: known are {', '.join(known)}")
    missing = [key for key in needed if key not in data]
    if missing:
        raise ValueError(f"{where} lacks the key {missing[0]}")
