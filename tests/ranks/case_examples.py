"""The scripts in examples/: whatever is parallel in them, the losses are those of one card."""

import io
import os
import sys
from contextlib import redirect_stdout

import numpy as np
from support.launch import ROOT, on_ranks
from truth import once

from mindformers_core.communication import world

sys.path.insert(0, str(ROOT / "examples"))
import own_loop  # noqa: E402
import vit  # noqa: E402

vit.STEPS = 2  # before the others take it
import vit_by_plan  # noqa: E402
import vit_in_a_pipeline  # noqa: E402
import vit_with_hooks  # noqa: E402
import vit_with_hsdp  # noqa: E402


@on_ranks(4)
def case_a_vision_transformer_equals_one_card():
    """By a plan."""
    check(vit_by_plan)


@on_ranks(nightly=(4,))
def case_more_vision_transformers_equal_one_card():
    """With `hsdp` and recompute; in a pipeline; with hooks, and jit."""
    check(vit_with_hsdp, vit_in_a_pipeline, vit_with_hooks)


def check(*scripts):
    expected = once(vit.train)()
    assert len(expected) == vit.STEPS and expected[-1] != expected[0]
    for script in scripts:
        with redirect_stdout(io.StringIO()):
            found = script.train(world().rank)
        losses = found[0] if script is vit_with_hsdp else found
        np.testing.assert_allclose(losses, expected, 1e-5, err_msg=script.__name__)


@on_ranks(nightly=(4,))
def case_a_loop_of_ones_own_resumes():
    """As `test_own_loop` on real ranks: its curve is that of the same ranks without an interruption."""
    folder = f"{os.environ['TRUTHS']}/own_loop"
    with redirect_stdout(io.StringIO()):
        expected = own_loop.train(world(), f"{folder}/whole", 12, 2)
        found = [*own_loop.train(world(), f"{folder}/run", 10, 2), *own_loop.train(world(), f"{folder}/run", 12, 2)]
    np.testing.assert_allclose(found, expected, 1e-6)
