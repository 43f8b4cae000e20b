"""Writes what the tool says into docs/propagation.md: the text of `explain`, and generated code.

python docs/make_propagation.py             the two blocks of the page
python docs/make_propagation.py PAGE.html   the HTML page of the example as well; for the picture in docs/images:

chromium --headless --no-sandbox --window-size=1180,1010 --screenshot=docs/images/propagation.png PAGE.html
"""

import ast
import re
import sys
from pathlib import Path

from mindspore import Parameter, nn, ops
from mindspore.common.initializer import initializer
from page_blocks import fenced, filled

from mindformers_core import ShardConfig, explain, init_device_mesh, init_distributed, prepare, shard
from mindformers_core.communication import shutdown
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.operators import tensor_meta

__all__ = ["PAGE", "blocks"]

PAGE = Path(__file__).resolve().parent / "propagation.md"


class Dense(nn.Cell):
    """The linear layer of MindSpore's tutorial on sharding propagation."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.weight = Parameter(initializer("normal", [in_channels, out_channels]))
        self.bias = Parameter(initializer("normal", [out_channels]))
        self.matmul = ops.MatMul()
        self.add = ops.Add()

    def construct(self, x):
        return self.add(self.matmul(x, self.weight), self.bias)


class FFN(nn.Cell):
    """The network of that tutorial."""

    def __init__(self):
        super().__init__()
        self.flatten = ops.Flatten()
        self.dense1 = Dense(28 * 28, 64)
        self.relu = ops.ReLU()
        self.dense2 = Dense(64, 10)

    def construct(self, x):
        return self.dense2(self.relu(self.dense1(self.flatten(x))))


def feed_forward(html=None):
    """What `explain` says of the tutorial's example, on 8 devices."""
    net = FFN().set_train()
    net.dense1.matmul.shard(((2, 1), (1, 4)))
    x = tensor_meta((256, 28, 28), "float32")
    shard(net, init_device_mesh((2, 4), ("dp", "tp")), inputs=(x,))
    return explain(net, x, html=html)


def decoder_layer():
    """What the generated file of a small Llama has for a decoder layer, with sequence parallelism."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8)).set_train()
    shard(model, init_device_mesh((2, 4), ("dp", "tp")), ShardConfig(batch_axes="dp", sequence_parallel=True))
    ids = tensor_meta((2, 32), "int32")  # this rank's: of 4 sequences 2
    source = Path(prepare(model, ids, labels=ids).file).read_text(encoding="utf-8")
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    (last,) = [name for name in functions if name.endswith("decoder_layer")]
    needed = _called(last, functions, source)
    lines = source.splitlines()
    made = [line for line in lines if re.match(r"(mesh|collectives|\w+_op|\w+) = ", line)]
    written = [
        "\n".join(lines[node.lineno - 1 : node.end_lineno]) for name, node in functions.items() if name in needed
    ]
    used = [line for line in made if re.search(rf"\b{line.split()[0]}\b", "\n".join([*written, *made[:2]]))]
    header = source[: source.index('"""\n', 3) + 4]
    return "\n\n\n".join([header + "\n# (imports)\n\n" + "\n".join(used), *written])


def _called(name, functions, source):
    """The names of a function and of all that it calls as programs."""
    inner = re.findall(r'program="(\w+)"', ast.get_source_segment(source, functions[name]))
    return {name}.union(*(_called(other, functions, source) for other in inner))


def blocks(html=None):
    """Name of a block of the page -> its Markdown."""
    init_distributed("fake", world_size=8)
    try:
        return {"explained": fenced("text", feed_forward(html)), "generated": fenced("python", decoder_layer())}
    finally:
        shutdown()


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), blocks(*sys.argv[1:2])), encoding="utf-8")
