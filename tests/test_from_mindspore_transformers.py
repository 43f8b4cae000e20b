"""docs/from_mindspore_transformers.md: its recipes, rows, plans, and the old checkpoints that it says how to read."""

import re
import shlex
from dataclasses import fields
from typing import get_type_hints

import mindspore as ms
import numpy as np
import pytest
import yaml
from mindspore.train.node_strategy_pb2 import ParallelStrategyMap
from support.documents import code_blocks, table_rows
from support.launch import ROOT

from mindformers_core.checkpoint.load import open_checkpoint
from mindformers_core.checkpoint.tensors import load_parameters, model_parts
from mindformers_core.commands.command_line import main
from mindformers_core.commands.dry_run import dry_run
from mindformers_core.communication import world
from mindformers_core.communication.simulated import SimulatedRanks
from mindformers_core.models import LlamaForCausalLM
from mindformers_core.recipe.loader import load_recipe
from mindformers_core.recipe.sections import Recipe

PAGE = ROOT / "docs" / "from_mindspore_transformers.md"
THEIRS, OURS = code_blocks(PAGE, "yaml")
BEGINNING, *PLANS, MERGE, RENAME = code_blocks(PAGE, "python")
ROWS = [(heading.strip("`"), cells) for heading, cells in table_rows(PAGE) if len(cells) == 3 and cells[0] != "there"]
WORDS = {"none", "`generate`", "`train`, `generate`"}  # in the place of our keys
OLD = {  # of a tensor of ours: its name in MindSpore Transformers, and the dim that two ranks have in parts there
    "embed_tokens.weight": ("tok_embeddings.embedding_weight", 0),
    "self_attn.q_proj.weight": ("attention.wq.weight", 0),
    "self_attn.k_proj.weight": ("attention.wk.weight", 0),
    "self_attn.v_proj.weight": ("attention.wv.weight", 0),
    "self_attn.o_proj.weight": ("attention.wo.weight", 1),
    "mlp.gate_proj.weight": ("feed_forward.w1.weight", 0),
    "mlp.down_proj.weight": ("feed_forward.w2.weight", 1),
    "mlp.up_proj.weight": ("feed_forward.w3.weight", 0),
    "input_layernorm.weight": ("attention_norm.weight", None),
    "post_attention_layernorm.weight": ("ffn_norm.weight", None),
    "norm.weight": ("norm_out.weight", None),
    "lm_head.weight": ("lm_head.weight", 0),
}


def keys_of(section, name):
    """The names of the keys in a section that have a value, or `name` where it is one."""
    if isinstance(section, dict) and section:
        return {key for inner, value in section.items() for key in keys_of(value, inner)}
    dicts = [each for each in section if isinstance(each, dict)] if isinstance(section, list) else []
    return {key for each in dicts for key in keys_of(each, name)} or {name}


def test_every_key_of_their_recipe_has_a_row():
    named = {}
    for heading, (there, _, _) in ROWS:
        named.setdefault(heading, set()).update(*map(re.compile(r"\w+").findall, re.findall("`([^`]+)`", there)))
    theirs = {(section, key) for section, value in yaml.safe_load(THEIRS).items() for key in keys_of(value, section)}
    assert len(theirs) > 100
    assert [each for each in theirs if each[1] not in named.get(each[0], named["The top"])] == []


def test_keys_of_ours_are_there_and_none_has_a_reason():
    kinds = get_type_hints(Recipe)
    known = {f"{each.name}.{key.name}" for each in fields(Recipe) for key in fields(kinds[each.name])} | {"model.name"}
    keys = [(there, re.findall(r"`([\w.]+)`", here)) for _, (there, here, _) in ROWS if here not in WORDS]
    assert [(there, here) for there, here in keys if not here or not known.issuperset(here)] == []
    assert [there for _, (there, here, note) in ROWS if here == "none" and not note] == []


def test_our_recipe_is_one(tmp_path):
    (tmp_path / "ours.yaml").write_text(OURS)
    theirs = yaml.safe_load(THEIRS)
    runner, sizes = theirs["runner_config"], theirs["parallel_config"]
    samples = runner["batch_size"] * sizes["micro_batch_num"] * sizes["data_parallel"]
    samples *= runner["gradient_accumulation_steps"]
    said = dry_run(load_recipe(str(tmp_path / "ours.yaml")))
    assert f"batch       {samples} sequences of 128 tokens a step" in said


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_computes_what_one_card_does(plan):
    """Of samples that are all equal."""

    def value(_, shape):
        return ms.Tensor(np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32))

    def work(rank):
        names = {"__name__": "page", "world": world}
        exec(BEGINNING.replace("init_distributed()", "world()"), names)
        names["initializer"] = value
        exec(plan, names)
        net, x = names["net"], names["x"]
        for row in net(x).to_local().asnumpy():
            np.testing.assert_allclose(row, names["FeedForward"](16, 64)(x)[0].asnumpy(), rtol=1e-5, atol=1e-5)
        return [tuple(each.shape) for each in net.get_parameters()]

    assert SimulatedRanks(4).run(work) == [[(32, 16), (16, 32)]] * 4


def test_old_checkpoints_are_read(tmp_path, monkeypatch):
    """Sliced files under MindSpore Transformers' names, by the page's lines and its command."""
    monkeypatch.chdir(tmp_path)
    (command,) = re.findall("mindformers_core (convert .*)", "".join(code_blocks(PAGE, "bash")))
    *arguments, config = shlex.split(command)
    net = LlamaForCausalLM(load_recipe(str(ROOT / config)).model)
    values = {each.name: each.asnumpy() for each in net.get_parameters()}
    write_sliced(values, tmp_path)
    exec(MERGE + RENAME, {})
    main([*arguments, str(ROOT / config)])
    for each in net.get_parameters():
        each.set_data(ms.Tensor(np.zeros(each.shape, np.float32)))
    load_parameters(open_checkpoint("output/old_llama"), model_parts([net], 0), None, True)
    for each in net.get_parameters():
        np.testing.assert_array_equal(each.asnumpy(), values[each.name])


def write_sliced(values, folder):
    """Files of two ranks and their strategy file, as MindSpore's semi-automatic parallelism leaves them."""
    strategy, ranks = ParallelStrategyMap(current_stage=0), ([], [])
    for path, value in values.items():
        end = next(end for end in OLD if path == end or path.endswith(f".{end}"))
        name, dim = path.removesuffix(end) + OLD[end][0], OLD[end][1]
        layout = strategy.parallel_layout_item.add(param_name=name).parallel_layouts
        layout.field = layout.opt_weight_shard_step = layout.opt_weight_shard_size = 0
        layout.dev_matrix.add().dim.append(2)
        layout.tensor_map.add().dim.extend(0 if each == dim else -1 for each in range(value.ndim))
        layout.param_split_shape.add()
        layout.indices_offset.add()
        for tensors, part in zip(ranks, [value] * 2 if dim is None else np.split(value, 2, dim)):
            tensors.append({"name": name, "data": ms.Tensor(part)})
    (folder / "strategy.ckpt").write_bytes(strategy.SerializeToString())
    for rank, tensors in enumerate(ranks):
        (folder / "sliced" / f"rank_{rank}").mkdir(parents=True)
        ms.save_checkpoint(tensors, f"sliced/rank_{rank}/checkpoint_{rank}.ckpt")
