"""Packages whose public names load the module behind them when they are first used. Pure Python."""

from importlib import import_module

from mindformers_core.hints import nearest

__all__ = ["public_names"]


def public_names(package, modules):
    """`__getattr__` and `__dir__` of a package.

    Args:
        package: its `__name__`.
        modules: public name -> the module that defines it: one of the package, or with a dot, of the package around it.
    """

    def get(name):
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'{nearest(name, modules)}")
        return getattr(import_module(f".{modules[name]}", package), name)

    def names():
        return sorted([*vars(import_module(package)), *modules])

    return get, names
