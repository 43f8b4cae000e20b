"""Random recipes of Llama models, for any mesh: dicts as of a YAML file."""

import random

SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zb_v": 2, "dualpipe_v": 2, "looped_bfs": 2}


def random_recipe(seed):
    """The sections of a recipe."""
    draw = random.Random(seed)
    tp, pp = draw.choice((1, 2, 2, 4)), draw.choice((1, 1, 2, 4))
    replicate, shard = draw.choice((1, 1, 2)), draw.choice((1, 2, 3, 4))
    schedule = draw.choice([*SCHEDULES]) if pp > 1 else "1f1b"
    chunks = SCHEDULES[schedule]
    parallelism = {
        "tensor_parallel": tp, "data_parallel_shard": shard, "data_parallel_replicate": replicate,
        "sequence_parallel": draw.random() < 0.5, "pipeline_parallel": pp, "pipeline_parallel_schedule": schedule,
        "pipeline_parallel_interleave_num": chunks if pp > 1 else 1,
        "pipeline_parallel_microbatch_size": draw.choice((1, 2, 3)),
        "zero_threshold_kb": draw.choice((0, 16, 64)),
        "comm_fusion": draw.choice(("auto", 1, {"mode": "index", "config": [3, 7]})),
        "zero_level": draw.choice((1, 2, 3, 3)) if shard > 1 and draw.random() < 0.7 else 0,
    }  # fmt: skip
    stages = pp * chunks if pp > 1 else 1
    layers = stages * draw.randint(1, 2 if stages > 2 else 5)
    kv = tp * draw.randint(1, 3)
    heads, head_dim = kv * draw.choice((1, 2, 3)), draw.choice((16, 32, 40))
    model = {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head_dim,
        "hidden_size": heads * head_dim if draw.random() < 0.6 else 8 * tp * draw.randint(5, 30),
        "intermediate_size": tp * draw.randint(50, 300), "vocab_size": tp * draw.randint(256, 1000),
        "max_position_embeddings": 1024, "tie_word_embeddings": draw.random() < 0.3,
    }  # fmt: skip
    if draw.random() < 0.3:
        kinds = [{}, {"intermediate_size": tp * 333}, {"num_key_value_heads": heads}]
        model["heterogeneous_block_specs"] = [draw.choice(kinds) for _ in range(layers)]
    batch = draw.randint(1, 12) * (parallelism["pipeline_parallel_microbatch_size"] * 2 * pp if pp > 1 else 1)
    return {
        "model": model, "parallelism": parallelism,
        "training": {"local_batch_size": batch, "gradient_accumulation_steps": draw.randint(1, 4)},
        "train_dataset": {"seq_length": tp * draw.randint(16, 100)},
        **random_activations(draw, layers, pp),
    }  # fmt: skip


def random_activations(draw, layers, stages):
    """The sections about recompute and swap."""
    some = sorted(draw.sample(range(layers), draw.randint(1, layers)))
    recompute = draw.choice((
        {}, {}, {"full": True}, {"full": some}, {"select": ["*.mlp"]},
        {"select": ["*.down_proj"]} if stages * layers > 4 else {"budget": 0.7},
        {"full": some[:1], "select": [f"layers.{layers - 1}.mlp"]},
    ))  # fmt: skip
    swap = draw.choice(({}, {}, {"op_swap": {"*.input_layernorm": {"layers": some}}}))
    sections = {"recompute": recompute, "swap": {} if {"full", "budget"} & recompute.keys() else swap}
    return {name: section for name, section in sections.items() if section}
