"""A step of the tiny recipe, and what Python does in it besides its passes, the norm and the update.

`loop` is all that `Trainer.steps()` does around the function of a step, in whose place it pauses for 5 ms: it takes the
batch, which a thread reads in the pause, computes the rate, makes and records the row. `program` is what a forward pass
does before it runs: the key of the call, and whether what the program depends on in Python is as it was. `schedule` is
the two runs of a pipeline of one stage whose passes compute nothing: draws, sums of gradients, the order of steps.
`loop`, with `program` once a micro-step and without the time of `pause`, has a limit.
"""

import sys
import tempfile
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from harness import Variant, repeated, run_benchmark, verdict

from mindformers_core import Trainer, hsdp, init_device_mesh, shard
from mindformers_core.pipeline import PipelineStage, Schedule1F1B
from mindformers_core.sharding.sharded_cells import tree_of

CONFIG = str(Path(__file__).resolve().parent.parent / "configs" / "llama_tiny_cpu_1p.yaml")
OPTIONS = "training.steps=100000", "monitor.plot=false", "context.check_replicas=0", "monitor.log_interval=1000000"
LIMIT = 1.0  # ms
CALLS = 50
PAUSE = 0.005  # seconds


def trainer_of():
    """A trainer of the recipe, and the generator of its steps."""
    trainer = Trainer(CONFIG, *OPTIONS, f"training.output_dir={tempfile.mkdtemp()}")
    return trainer, trainer.steps()


class Mean(ms.nn.Cell):
    """A stage with a weight."""

    def __init__(self):
        super().__init__()
        self.dense = ms.nn.Dense(4, 4)

    def construct(self, x):
        return ms.ops.mean(self.dense(x))


def empty_schedule():
    """The function of the two runs of a step of one stage, whose passes do nothing."""
    stage = PipelineStage(hsdp(shard(Mean(), init_device_mesh((1,), ("dp",))), accumulate_grad_step=2), 0, 1)
    schedule, x = Schedule1F1B(stage, 1, share_outputs=True), ms.Tensor(np.ones((2, 4), np.float32))
    done = (schedule.run(x),)
    stage.forward, stage.backward_input, stage.backward_weight = lambda *_: done, lambda *_: (), lambda *_: None

    def run():
        stage.zero_gradients()
        schedule.run(x)
        schedule.run(x)

    return run


def make_variants():
    """The variants; the losses of the first steps are checked to fall."""
    (trainer, steps), (around, empty) = trainer_of(), trainer_of()
    losses = [next(steps)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0], losses
    done = ms.Tensor(1.0), 1.0, None, {}
    around.run_step = lambda *_: time.sleep(PAUSE) or done
    tree = tree_of(trainer.cells[0])
    inputs = (ms.Tensor(np.zeros((trainer.plan.rows, 128), np.int32)),) * 2
    assert tree.known_program("", inputs, {}) is not None

    parts = {
        "loop": lambda: next(empty),
        "pause": lambda: time.sleep(PAUSE),
        "program": lambda: tree.known_program("", inputs, {}),
        "schedule": empty_schedule(),
    }
    return [
        Variant("step", "step", lambda: next(steps)),
        *(Variant(name, "step", repeated(part, CALLS), calls=CALLS) for name, part in parts.items()),
    ]


def remarks(results):
    """The sum, of a step of two micro-batches, and what its passes do besides computing, as they begin and end."""
    loop, pause, program, schedule = (results[name].median for name in ("loop", "pause", "program", "schedule"))
    total = 1e3 * (loop - pause + 2 * program)
    around = f"- as the passes begin and end: {1e3 * schedule:.3f} ms"
    return [f"- outside of the passes: {total:.3f} ms; {verdict(total, LIMIT)}", around], total <= LIMIT


if __name__ == "__main__":
    sys.exit(run_benchmark(__file__, 1, make_variants, f"{Path(CONFIG).name}, PyNative", remarks))
