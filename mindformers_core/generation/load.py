"""Generated modules as files: `@ms.jit` reads the source of the functions to compile, and a debugger steps through."""

import atexit
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import ModuleType

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindformers_core.communication import process_state, world

FOLDER_VARIABLE = "MINDFORMERS_CORE_GENERATED"  # environment variable: where generated modules are written, and stay


def load_module(name, source):
    """Write a `ModuleSource` to a file of its own, and import it.

    The folder is `$MINDFORMERS_CORE_GENERATED/rank_R`; without that variable a temporary one that is removed when the
    process ends.

    Returns:
        The module: `mindformers_core_generated.NAME_NUMBER`.
    """
    loaded = process_state().memo(__name__)
    number = loaded["modules"] = loaded.get("modules", -1) + 1
    file, instrumentation = (_folder() / f"{name}_{number}.py").resolve(), process_state().instrumentation
    text = instrumentation.text(source.text)
    file.write_text(text, encoding="utf-8")
    rank = f"_{world().rank}" if process_state().is_simulated else ""  # simulated ranks share sys.modules
    module = ModuleType(f"mindformers_core_generated{rank}_{file.stem}")
    module.__file__ = str(file)
    vars(module).update((constant, _tensor(content)) for constant, content in source.constants.items())
    module.observed = partial(process_state().observer.observed, source)
    instrumentation.loaded(module, source)
    sys.modules[module.__name__] = module  # the parser of @ms.jit looks for it there
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module


def _tensor(constant):
    """The tensor of a `Constant`; it shares the array's memory where it can."""
    if str(constant.array.dtype) == constant.value.dtype and constant.array.ndim:
        return Tensor.from_numpy(np.ascontiguousarray(constant.array))
    return Tensor(constant.array, getattr(ms, constant.value.dtype.replace("bool", "bool_")))


def _folder():
    """This rank's folder, created by the first call."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        folder = Path(chosen) / f"rank_{world().rank}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    loaded = process_state().memo(__name__)
    if "folder" not in loaded:
        loaded["folder"] = Path(tempfile.mkdtemp(prefix=f"mindformers_core_rank_{world().rank}_"))
        atexit.register(shutil.rmtree, loaded["folder"], ignore_errors=True)
        if process_state().watch is not None:
            process_state().watch.recorder.folders.append(loaded["folder"])
    return loaded["folder"]
