"""How a command ends by an error: what it says, and its exit code."""

import os
import sys
import traceback

from mindformers_core.scopes import origin_of
from mindformers_core.supervised import DEFECT, USER, tell_end

_OF_THE_MACHINE = (OSError, ImportError, MemoryError)  # files, packages and memory are the user's wherever they lack
_DEPENDENCIES = ("mindspore", "numpy", "scipy", "yaml")


def end_by(error):
    """Report the error that ends a command on stderr, and to the ranks that wait for this one.

    Where a `raise` statement or the machine made it, it is a line, else, or with the environment variable
    MINDFORMERS_DEBUG=1, it comes with its traceback.

    Returns:
        The exit code: 2 for these, and for errors in the user's own code; 70 for any other, which is a defect of ours;
        75 where another rank has begun the end.
    """
    origin = "raise" if isinstance(error, _OF_THE_MACHINE) else origin_of(error)
    if origin != "raise" or os.environ.get("MINDFORMERS_DEBUG"):
        traceback.print_exception(error)
    text = str(error) if origin == "raise" else f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _DEPENDENCIES:
        text = (
            f"{error.name} is not installed in {sys.executable}: run bash scripts/quickstart.sh, or pip install . "
            "(if that is done: source .venv/bin/activate)"
        )
    if origin == "package":
        text = f"not foreseen by mindformers_core: {text}: please report it, with the traceback above"
    print(f"error: {text}", file=sys.stderr)
    code, world = DEFECT if origin == "package" else USER, sys.modules.get("mindformers_core.communication.world")
    if world and (watch := world.process_state().watch):
        return watch.fail(error, code)
    tell_end(f"{type(error).__name__}: {error}", code)
    return code
