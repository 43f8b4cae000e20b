"""Time and memory of a step with activations computed again: none, attention, under a budget, and all.

A Llama after `shard()` over a mesh of one, in one process: loss and gradients of all parameters. That losses and
gradients are those of `none` in the same mode, bit by bit, is checked before any is timed. Memory is measured after
that, for each variant in a process of its own (see recompute_memory.py).
"""

import json
import os
import subprocess
import sys

import numpy as np
import recompute_memory
from harness import Variant, ratio_remarks, run_benchmark, verdict
from recompute_memory import (
    BATCH,
    HEADS,
    HIDDEN,
    LAYERS,
    LENGTH,
    MEMORY_BATCH,
    SETTINGS,
    TIMED_LAYERS,
    model_of,
    step_of,
    text,
)  # fmt: skip

TITLE = (
    f"Llama, {TIMED_LAYERS} layers, hidden {HIDDEN}, {HEADS} heads, length {LENGTH}, batch {BATCH} (memory: {LAYERS} "
    f"layers, batch {MEMORY_BATCH}), float32, forward and backward"
)
LIMITS = {  # of a variant's time over that of none in the same mode
    ("selective", "pynative"): 1.20,
    ("selective", "jit"): 1.20,
    ("full", "pynative"): 1.40,  # a forward pass more, a third of the step, and what is done to tell what to run again
    ("full", "jit"): 1.40,
}
KEPT_LIMIT = 0.02  # what is measured to be kept differs from what is predicted by this part at most
RESIDENT_LIMITS = {  # of a variant's peak resident memory, over that before, over none's in the same mode
    ("selective", "pynative"): 0.92,
    ("budget_0.5", "pynative"): 0.65,
    ("full", "pynative"): 0.65,  # a layer's activations, beside the gradients
    ("selective", "jit"): 0.50,
    ("full", "jit"): 0.50,
}
MEMORY_TIMEOUT = 300  # seconds


def make_variants():
    """All variants, once they are checked to give the bits of `none`."""
    inputs = text(BATCH, LENGTH)
    variants, truths = [], {}
    for variant, mode in SETTINGS:
        step = step_of(model_of(variant, mode, TIMED_LAYERS), mode)
        found = [one.asnumpy() for one in step(*inputs)]
        check_equal(f"{variant}/{mode}", found, truths.setdefault(mode, found))
        variants.append(Variant(f"{variant}/{mode}", f"none/{mode}", lambda step=step: step(*inputs)))
    return variants


def check_equal(name, found, expected):
    """Compare a loss and gradients.

    Raises:
        ValueError: one differs in any bit.
    """
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not np.array_equal(one, other):
            what = f"gradient {place - 1}" if place else "the loss"
            raise ValueError(f"{name}: {what} differs from that without recompute")


def memory_of(variant, mode):
    """What recompute_memory.py measures, in MB by name.

    Raises:
        CalledProcessError: it failed; what it said is on stderr.
    """
    command = [sys.executable, recompute_memory.__file__, variant, mode]
    environment = {"GLOG_v": "3", **os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, timeout=MEMORY_TIMEOUT, check=True, text=True
    )
    return json.loads(ended.stdout.splitlines()[-1])


def remarks(results):
    """Ratios that have a limit, and memory, which is measured now; `(lines, whether all limits are kept)`."""
    lines, kept = time_remarks(results)
    more, also_kept = memory_remarks({pair: memory_of(*pair) for pair in SETTINGS})
    return lines + more, kept and also_kept


def time_remarks(results):
    """Times over those without; `(lines, whether all limits are kept)`."""
    limits = [(f"{variant}/{mode}", f"none/{mode}", limit) for (variant, mode), limit in LIMITS.items()]
    return ratio_remarks(results, limits)


def memory_remarks(memory):
    """Of what `memory_of` gives by variant and mode; `(lines, whether all limits are kept)`."""
    lines, all_kept = [], True
    for (variant, mode), found in memory.items():
        name, base = f"{variant}/{mode}", memory["none", mode]
        ratio = found["resident"] / base["resident"]
        line = f"- {name}: peak resident memory {found['resident']:.0f} MB over that before, {ratio:.3f} of none/{mode}"
        if (limit := RESIDENT_LIMITS.get((variant, mode))) is not None:
            line += f"; {verdict(ratio, limit)}"
            all_kept = all_kept and ratio <= limit
        lines.append(line)
        if "kept" in found:
            error = abs(found["kept"] / found["predicted"] - 1)
            all_kept = all_kept and error <= KEPT_LIMIT
            lines.append(
                f"- {name}: {found['kept']:.1f} MB kept for the backward pass, {found['kept'] / base['kept']:.3f} of "
                f"none/{mode}; predicted {found['predicted']:.1f} MB, off by {error:.4f}; {verdict(error, KEPT_LIMIT)}"
            )
    return lines, all_kept


if __name__ == "__main__":
    sys.exit(run_benchmark(__file__, 1, make_variants, TITLE, remarks))
