"""MindSpore's recordings for gradients in PyNative, and their removal after an error."""

from contextlib import contextmanager

from mindformers_core.mindspore_private import pynative_executor


def forget_recordings():
    """Clear all recordings of gradients in MindSpore, also those that an error interrupted.

    The compiled gradients are cleared with them, so this function is for errors, not for every step.
    """
    pynative_executor.set_grad_flag(True)
    pynative_executor.new_graph(forget_recordings)  # else a gradient that hadn't begun is still counted
    pynative_executor.clear_res()
    pynative_executor.set_grad_flag(False)


@contextmanager
def no_gradient_left_waiting(cell):
    """A context manager around a call of a Cell: an error before the Cell's own `__call__` leaves no open gradient.

    `mindspore.value_and_grad(cell)` counts a gradient before it calls the Cell, which begins to record in `__call__`.
    After an error between the two, the next gradient would be nested in the open one.
    """
    try:
        yield
    except Exception:
        if cell.requires_grad and not pynative_executor.grad_flag():
            forget_recordings()
        raise
