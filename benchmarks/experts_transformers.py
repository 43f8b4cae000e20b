"""The expert parallelism of `transformers` on gloo: a layer of experts on two processes against one, as experts.py.

    pip install torch transformers accelerate   # in an environment of its own
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/experts_transformers.py

Its layer is that of Qwen3-MoE with a little attention before it, in whole models (FSDP's hooks are on these); tokens
are shared (`fsdp_size`) and sent to the experts (`ep_size`). Both give the same loss and gradient of the input.
"""

import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

EP, EXPERTS, CHOICES, HIDDEN, INNER, BATCH, LENGTH, SEED = 2, 8, 2, 256, 1024, 4, 256, 5
REPEATS = 9
CONFIG = Qwen3MoeConfig(
    hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=CHOICES,
    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=16, vocab_size=64, norm_topk_prob=True,
)  # fmt: skip


def main():
    """Print the medians and their ratio."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.manual_seed(SEED)
    single = Qwen3MoeForCausalLM(CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        if rank == 0:
            single.save_pretrained(folder)
        dist.barrier()
        config = DistributedConfig(fsdp_size=EP, ep_size=EP)
        parallel = Qwen3MoeForCausalLM.from_pretrained(folders[0], dtype=torch.float32, distributed_config=config)
        dist.barrier()
    whole = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(SEED))
    part = whole.chunk(EP)[rank]
    (loss, slope), (own_loss, own_slope) = step(single, whole), step(parallel, part)
    dist.all_reduce(own_loss)
    torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(own_slope, slope.chunk(EP)[rank], rtol=0, atol=1e-5 * float(slope.abs().max()))
    seconds = {"single": [], "ep 2": []}
    for _ in range(REPEATS):
        for name, model, inputs in (("single", single, whole), ("ep 2", parallel, part)):
            dist.barrier()
            start = time.perf_counter()
            if name != "single" or rank == 0:
                step(model, inputs)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        one, two = (statistics.median(each) for each in seconds.values())
        print(f"transformers on gloo: {two / one:.2f} of one process, {1000 * two:.0f} ms for {1000 * one:.0f}")
    dist.destroy_process_group()


def step(model, inputs):
    """Loss, and gradient of the input."""
    model.zero_grad()
    inputs = inputs.detach().requires_grad_()
    loss = model(inputs_embeds=inputs).logits.square().sum()
    loss.backward()
    return loss.detach(), inputs.grad


if __name__ == "__main__":
    main()
