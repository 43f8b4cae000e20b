"""The README's Python runs as it stands, on the four ranks that it speaks of."""

from pathlib import Path

import numpy as np
from support.documents import code_blocks
from support.launch import on_ranks

README = Path(__file__).parent.parent.parent / "README.md"


HOOKED = "net = shard(MLP(hidden=8, inner=32), mesh)\n"


def check(source):
    """The example's loss, and its gradients, all equal: 0.08 = relu(8 x 0.01); 0.01 = 8 x 0.08 / (8 x 8)."""
    names = {"__name__": "mlp"}
    exec(compile(source, "README.md", "exec"), names)
    np.testing.assert_allclose(names["loss"].asnumpy(), 32 * 0.08 * 0.01, rtol=1e-6)
    up, down = (gradient.asnumpy() for gradient in names["gradients"])
    assert (up.shape, down.shape) == ((16, 8), (8, 16))
    np.testing.assert_allclose(up, 0.01, rtol=1e-6)
    np.testing.assert_allclose(down, 0.01, rtol=1e-6)


@on_ranks(4)
def case_readme_example_and_plan():
    """The hook, and then the plan alone, give the values of one card."""
    example, plan, imports, *_ = code_blocks(README, "python")
    check(example)
    assert example.count(HOOKED) == 1
    check(example.replace(HOOKED, "del MLP.shard\n" + plan))
    exec(compile(imports, "README.md", "exec"), {})
