"""The code of docs/pipeline.md and its examples runs as it stands, and gives what one card does."""

import io
import sys
from contextlib import redirect_stdout

import mindspore as ms
import numpy as np
from support.documents import code_blocks
from support.launch import ROOT, on_ranks

from mindformers_core.communication import world
from mindformers_core.models import LlamaForCausalLM
from mindformers_core.tensor_parallel import materialize

sys.path.insert(0, str(ROOT / "examples"))
from train_own_schedule import main  # noqa: E402

PAGE = ROOT / "docs" / "pipeline.md"


@on_ranks(2, nightly=(4,))
def case_the_example_equals_one_card():
    """It compares losses and parameters itself, and prints what the page shows."""
    with redirect_stdout(io.StringIO()) as said:
        main()
    shown = [block for block in code_blocks(PAGE, "text") if block.startswith("rank 0: losses")]
    assert shown == [said.getvalue().replace(f"rank {world().rank}", "rank 0")]


@on_ranks(nightly=(4,))
def case_the_page_s_pipeline_equals_one_card():
    """Loss, and gradients of the whole parameters among the stage's."""
    names = {"__name__": "page"}
    (source,) = [block for block in code_blocks(PAGE, "python") if "LlamaForCausalLM" in block]
    exec(compile(source, "pipeline.md", "exec"), names)
    with ms.DeviceCtx("meta"):
        whole = LlamaForCausalLM(names["config"])
    materialize(whole, seed=0)
    weights = whole.trainable_params()
    ids, stage = names["ids"], names["stage"]
    loss, gradients = ms.value_and_grad(lambda ids: whole(ids, labels=ids), None, weights)(ids)
    expected = {weight.name: gradient.asnumpy() for weight, gradient in zip(weights, gradients)}
    assert (names["loss"] is None) == (names["place"] == 0)
    if names["loss"] is not None:
        np.testing.assert_allclose(names["loss"].asnumpy(), loss.asnumpy(), rtol=1e-5)
    compared = 0
    for parameter, gradient in zip(stage.parameters, names["gradients"], strict=True):
        if gradient.shape == expected[parameter.name].shape:
            np.testing.assert_allclose(gradient.asnumpy(), expected[parameter.name], rtol=1e-4, atol=1e-6)
            compared += 1
    assert compared >= 4  # the norms of two layers
