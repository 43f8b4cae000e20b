"""How long the steps of the quickstart's recipe wait for their data, on 4 ranks; its documents are packed.

`wait` is `data_seconds` of a step, in which a rank waits for the batch that its thread has read during the step before,
on the same core. `read` is how long a batch takes to read: what a step would wait without that thread.
"""

import itertools
import sys
from pathlib import Path

from harness import Variant, run_benchmark, verdict

from mindformers_core import Trainer

CONFIG = str(Path(__file__).resolve().parent.parent / "configs" / "llama_tiny_cpu.yaml")
OPTIONS = "training.steps=100000", "monitor.plot=false", "context.check_replicas=0", "train_dataset.packing=documents"
RANKS, LIMIT = 4, 0.01


def make_variants():
    """The variants; the losses of the first steps are checked to fall."""
    trainer = Trainer(CONFIG, *OPTIONS, "training.output_dir=run")
    steps, read, far = trainer.steps(), trainer._batches._read, itertools.count(10**6, trainer.plan.samples)
    losses = [next(steps)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0], losses

    return [
        Variant("step", "step", lambda: float(next(steps)["seconds"])),
        Variant("wait", "step", lambda: float(next(steps)["data_seconds"])),
        Variant("read", "step", lambda: read(next(far))),
    ]


def remarks(results):
    """The part of a step that waits, against what it may be: `(lines, whether it is kept)`."""
    part = results["wait"].median / results["step"].median
    return [f"- wait: {part:.5f} of step; {verdict(part, LIMIT)}"], part <= LIMIT


if __name__ == "__main__":
    sys.exit(run_benchmark(__file__, RANKS, make_variants, f"{Path(CONFIG).name}, packed", remarks))
