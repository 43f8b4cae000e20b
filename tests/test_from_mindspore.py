"""docs/from_mindspore.md: every interface of the design documents has a row, and every line of a row runs."""

import ast
import json
import re
from dataclasses import fields

import mindspore as ms
import numpy as np
import pytest
import yaml
from mindspore import nn, ops
from support.documents import code_blocks, table_rows
from support.launch import ROOT

from mindformers_core import explain
from mindformers_core.communication import shutdown, world
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.dtensor.dtensor import DTensor
from mindformers_core.recipe.loader import load_recipe, recipe_to_dict
from mindformers_core.recipe.sections import Recipe
from mindformers_core.sharding.sharded_cells import ShardedCell

PAGE = ROOT / "docs" / "from_mindspore.md"
BEGINNING, LOOKUP, HOOK, PIPELINE = (
    each.replace("init_distributed()", "world()") for each in code_blocks(PAGE, "python")
)
ROWS = [cells for _, cells in table_rows(PAGE) if cells[1:] != ("here", "line")]
LINES = dict.fromkeys(line for _, _, cell in ROWS for line in re.findall(r"`([^`]+)`", cell))
SECTIONS = tuple(f"{entry.name}: " for entry in fields(Recipe))
SHOWN = {  # part of a line -> what `explain` says of the model after it
    "matmul.shard(": "float32 [8, 64] -> [4, 32]              [dp, tp]",
    '"weight": layout(None, "tp")': "float32 [16, 64] -> [16, 32]            [-, tp]",
    '"input": layout("dp")': "float32 [16, 16] -> [8, 16]             [dp, -]",
    '"level1"': "level1: optimizer state in 2 parts",
    '"level2"': "level2: optimizer state and gradients in 2 parts",
    '"level3"': "level3: optimizer state, gradients and weights in",
    "threshold=1": "4 parameters are cut: 16.0 KiB as they compute, 8.0 KiB of parts here",
    "shard_size=2": "in 2 groups that hold the same",
    "full=[0]": "layers.0: GeLU",
    "full=True": "layers.0-1: GeLU",
    "select=": "layers.0-1: GeLU",
    "op_swap=": "wait on the host",
    '"index", "config": [1, 3]': "    2: ",
    '"auto"': "(4 in all)",
    '"size"': "0: all_gather",
}

INTERFACES = {
    "the table of MindSpore's design": """
        Primitive.shard, add_prim_attr, manual_split, primitive_target, EmbeddingLookup, enable_alltoall,
        pipeline_stages, Cell.pipeline_stage, PipelineCell, enable_parallel_optimizer, parallel_optimizer_config,
        gradient_accumulation_shard, parallel_optimizer_threshold, Primitive.recompute, Cell.recompute,
        mp_comm_recompute, parallel_optimizer_comm_recompute, search_mode, sharding_propagation, dynamic_programming,
        recursive_programming, set_algo_parameters, fully_use_devices, all_reduce_fusion_config, comm_fusion, "auto",
        "size", "index", dataset_strategy, "full_batch", "data_parallel", infer_predict_layout,
        load_distributed_checkpoint, predict_strategy, train_strategy_filename, Cell.shard, ops.shard, device, level
    """,
    "its text": """
        communication.init, WORLD_COMM_GROUP, DATA_PARALLEL, HYBRID_PARALLEL, SEMI_AUTO_PARALLEL, AUTO_PARALLEL,
        num_shards, shard_id, parameter_broadcast, mean, AllReduce, AllGather, ReduceScatter, Broadcast,
        grad_reducer.py, TrainOneStepCell, device_matrix, tensor_map, tensor_shape, Host & Device, Parameter Server
    """,
    "the RFC": """
        shard(self, config), layout("cp_dp", "tp"), manual, dtensor, shard, model_split_manual, build_layer,
        get_transformer_layer_offset, get_fp8_context, build_module, heterogeneous_block_specs, vp_stage,
        PipelineScheduleBase, run_microbatches, run, MetaStep, MetaStepType, construct_exec_order, GPipe, 1F1B, VPP,
        ZBV, hsdp, shard_size, threshold, optimizer_level, accumulate_grad_step, recompute, swap, dynamic shapes,
        control flow
    """,
    "paddle.distributed.split": """
        "embedding", "linear", case 1, case 2, case 3, axis, num_partitions, gather_out, weight_attr, bias_attr, name
    """,
    "sharding propagation and constraints": """
        set_seed, save_graphs, step_parallel_begin_xxxx.ir, xx_validate_xxx.ir, repeated calculation,
        constraints of operators
    """,
}


@pytest.mark.parametrize("document", INTERFACES)
def test_every_interface_has_a_row(document):
    named = " ".join(old for old, _, _ in ROWS)
    names = re.split(r",\s+(?![^(]*\))", INTERFACES[document].strip())
    assert [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", named)] == []


def test_a_row_has_a_line_or_a_reason():
    assert {len(cells) for cells in ROWS} == {3}
    assert [old for old, here, line in ROWS if (line == "–") != here.startswith("Not here")] == []


@pytest.mark.parametrize("line", [each for each in LINES if each.startswith(SECTIONS)])
def test_a_line_of_a_recipe_is_read(line):
    given = {f"{section}.{key}": value for section, keys in yaml.safe_load(line).items() for key, value in keys.items()}
    overrides = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    recipe = recipe_to_dict(load_recipe(str(ROOT / "configs" / "llama_tiny_cpu.yaml"), overrides))
    for key, value in given.items():
        section, name = key.split(".")
        assert recipe[section][name] not in (None, [], {}) or value is None


@pytest.mark.parametrize("line", [each for each in LINES if not each.startswith(SECTIONS)])
def test_a_line_runs(line, rank_0_of_4, tmp_path, monkeypatch):
    """What computes does so on four simulated ranks, a loss as on one card; else one of four ranks makes the plan."""
    monkeypatch.chdir(tmp_path)
    if re.search(r"\(x\b[^()]*\)$|^split\(|\.full_tensor\(\)$", line):
        shutdown()
        for names in SimulatedRanks(4).run(lambda rank: run(line)):
            loss = names["loss"] if "loss," in line else names.get("result")
            if isinstance(loss, ms.Tensor) and loss.ndim == 0:
                loss = loss.to_local() if isinstance(loss, DTensor) else loss
                np.testing.assert_allclose(loss.item(), names["Net"]()(names["x"]).item(), rtol=1e-5)
        return
    names = run(line)
    if isinstance(names["net"], ShardedCell):
        said = explain(names["net"], names["x"])
        assert [text for part, text in SHOWN.items() if part in line and text not in said] == [], said


def test_manual_splits():
    def work(rank):
        names = run(LOOKUP)
        return names["y"].asnumpy(), [each.shape for each in names["net"].get_parameters()]

    expected = value_of(None, (64, 8)).asnumpy()[[[3, 12, 59, 60], [0, 29, 30, 63]]]
    for found, shapes in SimulatedRanks(4).run(work):
        np.testing.assert_array_equal(found, expected)
        assert shapes == [(30, 8)]


def test_the_hook_of_the_rfc():
    def work(rank):
        names = run(HOOK)
        layers = [names["Linear"](*sizes) for sizes in ((16, 64), (64, 16))]
        for row in names["y"].to_local().asnumpy():
            np.testing.assert_allclose(row, nn.SequentialCell(*layers)(names["x"])[0].asnumpy(), rtol=1e-5)

    SimulatedRanks(4).run(work)


def test_the_pipeline_of_the_rfc():
    """Loss and all gradients are those of the whole model."""
    ranks = SimulatedRanks(4).run(lambda rank: run(PIPELINE))
    whole = ranks[0]["Transformer"](8)
    values = {each.name: each for names in ranks for each in names["stage"].parameters}
    found = {each.name: value for names in ranks for each, value in zip(names["stage"].parameters, names["gradients"])}
    for each in whole.get_parameters():
        each.set_data(values[each.name])
    weights, ids, labels = whole.trainable_params(), ranks[0]["ids"], ranks[0]["labels"]
    loss, gradients = ms.value_and_grad(lambda: ops.cross_entropy(whole(ids), labels), None, weights)()
    np.testing.assert_allclose(ranks[3]["loss"].item(), loss.item(), rtol=1e-5)
    for each, gradient in zip(weights, gradients, strict=True):
        np.testing.assert_allclose(found.pop(each.name).asnumpy(), gradient.asnumpy(), rtol=1e-4, atol=1e-6)
    assert not found


def run(code):
    """The names after the page's beginning, with other values of weights, and `code`; `result` is of its last line."""
    names = {"__name__": "page", "world": world, "value_of": value_of}
    exec(BEGINNING.replace("net = Net()", "initializer = value_of\nnet = Net()"), names)
    tree = ast.parse(code.replace("init_distributed()", "world()"))
    if isinstance(tree.body[-1], ast.Expr):
        tree.body[-1] = ast.Assign([ast.Name("result", ast.Store())], tree.body[-1].value)
    exec(compile(ast.fix_missing_locations(tree), "<line>", "exec"), names)
    return names


def value_of(_, shape):
    return ms.Tensor(np.random.default_rng(shape[0]).normal(0, 0.1, shape).astype(np.float32))
