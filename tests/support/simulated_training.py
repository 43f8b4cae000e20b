"""Steps of a recipe on simulated ranks, of which the parts of all ranks make whole arrays."""

import numpy as np

from mindformers_core.commands.diffing import run_simulated
from mindformers_core.communication.world import process_state
from mindformers_core.padding import stored_shape
from mindformers_core.program.observer import Observer

__all__ = ["train_simulated"]


class Gradients(Observer):
    """Keeps the reduced gradients of a rank's first step, by path: Parameters and arrays."""

    def __init__(self):
        self.found = {}

    def held(self, what, tensor, parameter=None):
        if what == "reduced gradient":
            self.found.setdefault(parameter.name, (parameter, tensor.asnumpy()))


def train_simulated(recipe, steps):
    """Every rank's rows; by path the gradients of the first step, and the parameters at the end; and the jobs."""
    observers, jobs = {}, []

    def begin(job):
        observers[job.rank] = process_state().observer = Gradients()
        jobs.append(job)

    rows = run_simulated(recipe, steps, begin)
    gradients, weights = {}, {}
    for rank, observer in observers.items():
        for path, (parameter, gradient) in observer.found.items():
            for whole, part in ((gradients, gradient), (weights, parameter.asnumpy())):
                at = whole.setdefault(path, np.full(stored_shape(parameter), np.nan, np.float32))
                at[parameter.layout.local_slices(at.shape, rank)] = part
    return rows, gradients, weights, jobs
