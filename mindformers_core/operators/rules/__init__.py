"""Rules of operators, one small file of tables a family: importing it fills the registry. Pure Python."""

from importlib import import_module
from pkgutil import iter_modules

for _family in iter_modules(__path__):
    import_module(f"{__name__}.{_family.name}")
