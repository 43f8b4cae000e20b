"""Writes what the tools say into docs/recompute.md, and the picture of a budget into docs/images.

python docs/make_recompute.py
"""

from pathlib import Path

import mindspore as ms
from page_blocks import fenced, filled

from mindformers_core import explain, init_device_mesh, init_distributed, prepare, shard
from mindformers_core.communication import shutdown
from mindformers_core.models import LlamaConfig, LlamaForCausalLM
from mindformers_core.operators import tensor_meta
from mindformers_core.recompute import recompute, swap, write_curve

__all__ = ["IMAGES", "PAGE", "blocks"]

DOCS = Path(__file__).resolve().parent
PAGE, IMAGES = DOCS / "recompute.md", DOCS / "images"
SIZES = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}


def model():
    """A sharded Llama of 8 layers, on shapes alone, and what it is called with: 4 sequences of 1024 tokens."""
    with ms.DeviceCtx("meta"):
        net = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=16, num_key_value_heads=16)).set_train()
        shard(net, init_device_mesh((1, 2), ("dp", "tp")))
    ids = tensor_meta((4, 1024), "int32")
    return net, (ids, ids)


def explained():
    """What `explain` says of a part of a layer, and at its end."""
    net, inputs = model()
    recompute(net, select=["*.self_attn", "layers.0-3.mlp.SiLU"])
    swap(net, op_swap={"layers.0-3.mlp.up_proj": True})
    lines = explain(net, *inputs).splitlines()
    start, end, sums = (
        next(place for place, line in enumerate(lines) if line.startswith(beginning))
        for beginning in ("        core_attention", "        down_proj", "recompute:")
    )
    return "\n".join(["…", *lines[start:end], "…", *lines[sums:]])


def chosen(folder):
    """What is chosen within half of the bytes; writes its picture into a folder."""
    net, inputs = model()
    recompute(net, budget=0.5)
    prepare(net, *inputs)
    return write_curve(net, Path(folder) / "recompute_curve.svg")


def blocks(folder):
    """Name of a block of the page -> its Markdown; writes the picture into a folder."""
    init_distributed("fake", world_size=2)
    try:
        return {"explained": fenced("text", explained()), "chosen": fenced("text", chosen(folder))}
    finally:
        shutdown()


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), blocks(IMAGES)), encoding="utf-8")
