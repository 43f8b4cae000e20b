"""Imports at the first use: of public names of packages, and of users' objects by path. Pure Python."""

from importlib import import_module

from mindformers_core.hints import nearest


def lazy_exports(package, exports):
    """`__all__`, `__getattr__` and `__dir__` of a package.

    Args:
        package: its `__name__`.
        exports: a module in the package, or with a dot in front in the parent package -> the public names that it
            defines, separated by spaces.
    """
    modules = {name: module for module, names in exports.items() for name in names.split()}

    def get(name):
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'{nearest(name, modules)}")
        return getattr(import_module(f".{modules[name]}", package), name)

    def names():
        return sorted([*vars(import_module(package)), *modules])

    return [*modules], get, names


def import_object(path, what):
    """The object at the import path "package.module:NAME"; errors call it `what`.

    Raises:
        ValueError: no such module or attribute; names the nearest class.
    """
    module_name, _, attribute = path.rpartition(":" if ":" in path else ".")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        # a failed import inside the module is an error of the module
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
