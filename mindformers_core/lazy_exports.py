"""Names that are imported when they are first used: public names of packages, a user's own by path. Pure Python."""

from importlib import import_module

from mindformers_core.hints import nearest

__all__ = ["import_object", "lazy_exports"]


def lazy_exports(package, modules):
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


def import_object(path, what):
    """What "package.module:NAME" stands for; `what` is what errors call it.

    Raises:
        ValueError: no such module or attribute, with the nearest one that there is.
    """
    module_name, _, attribute = path.rpartition(":" if ":" in path else ".")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        # Only where the module itself, or a package that it is in, isn't there: its own imports' failures are theirs.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{what} {path!r}: there is no module {error.name!r}: write where Python can import it from (the working "
            "folder is searched if it is on PYTHONPATH)"
        ) from error
    if not hasattr(module, attribute):
        hint = nearest(attribute, [name for name, value in vars(module).items() if isinstance(value, type)])
        raise ValueError(f"{what} {path!r}: the module {module_name!r} has no {attribute!r}{hint}")
    return getattr(module, attribute)
