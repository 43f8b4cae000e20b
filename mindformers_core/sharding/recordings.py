"""What MindSpore records of gradients in PyNative, and how to be rid of it after an error."""

from contextlib import contextmanager

from mindspore.graph.api import _pynative_executor

__all__ = ["forget_recordings", "no_gradient_left_waiting"]


def forget_recordings():
    """Make MindSpore forget all gradients that it records, also those that an error has ended.

    What it compiled for gradients goes with them, so this is for errors, not for every step.
    """
    _pynative_executor.set_grad_flag(True)
    _pynative_executor.new_graph(forget_recordings)  # without one, it goes on counting a gradient that hadn't begun
    _pynative_executor.clear_res()
    _pynative_executor.set_grad_flag(False)


@contextmanager
def no_gradient_left_waiting(cell):
    """Open around a call of a Cell: an error ahead of the Cell's own `__call__` leaves no gradient that waits for it.

    `mindspore.value_and_grad(cell)` counts a gradient before it calls the Cell, which begins to record in `__call__`.
    An error between the two would make the next gradient a second one, within the first.
    """
    try:
        yield
    except Exception:
        if cell.requires_grad and not _pynative_executor.grad_flag():
            forget_recordings()
        raise
