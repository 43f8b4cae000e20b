"""What settings ask for against the model: a whole one, and stages of a pipeline; what none of them has is an error."""

import json
import re
from types import SimpleNamespace

import mindspore as ms
import pytest
from mindspore import Tensor, nn, ops
from support.nightly import daily
from support.recomputed_models import INPUTS, Cast, Net, llama, sharded
from support.small_cells import cell_of
from support.small_pipelines import Scale, array, pipeline

import mindformers_core
from mindformers_core.mesh import init_device_mesh
from mindformers_core.program.operator_names import Label, OperatorName
from mindformers_core.program.plan import Instruction
from mindformers_core.recompute import recompute, swap
from mindformers_core.recompute.selection import NamedProgram
from mindformers_core.recompute.settings import RecomputeSettings, SwapSettings
from mindformers_core.recompute.stages import check_stages, stage_summary
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import prepare, shard
from mindformers_core.zero import hsdp, value_and_grad

pytestmark = pytest.mark.usefixtures("one_rank")
X = Tensor(array(4, 4))
LAYERS = {0: ["layers.0"]}, {1: ["layers.1"]}
PATHS = ["", "layers", "layers.0"], ["", "layers", "layers.1"]


def program_of(cells, path, operator, variable):
    """What is known of a program of some Cells with one operator."""
    label = Label(variable or operator, bool(variable))
    name = OperatorName(Instruction((len(cells),), path, None, None), path, operator, (label,))
    program = object.__new__(NamedProgram)
    program.names, program.closed, program.path, program.layers = [name], set(), "", {}
    program.cells = [((number,), each) for number, each in enumerate(cells)]
    program.places, program._nameless = [name.place], []
    inside = {key: {name.place.key} for key, each in program.cells if each in (path, "")}
    program.prediction = SimpleNamespace(cell_keys=lambda key: inside.get(key, set()))
    program.inside = lambda roots: {name.place.key} if {*roots} & {name.place.key, *inside} else set()
    return program


PROGRAMS = program_of(["", "layers.0"], "layers.0", "Tanh", None), program_of(["", "layers.1"], "", "Mean", "mean")


def scales(settings, swapped, second=None, compiled=False):
    """Two stages on one rank, layers 0 and 1; the second one with settings of its own, or the same."""
    mesh = init_device_mesh((1,), ("tp",))
    cells = [shard(Scale(number, number == 1), mesh).set_train() for number in range(2)]
    for cell, own in zip(cells, (settings, settings if second is None else second)):
        swap(recompute(cell, is_part=True, **own), is_part=True, **swapped)
    return pipeline(cells, 2, compiled=compiled)


@pytest.mark.parametrize(
    ("settings", "swapped", "message"),
    [
        ({"full": "0-2"}, {}, "recompute.full: there is no layer 2: the layers are 0 to 1"),
        ({}, {"layer_swap": [{"layers": [1, 3]}]}, "swap.layer_swap[0].layers: there is no layer 3: the layers are 0"),
        ({}, {"op_swap": {"tanh": {"layers": "4"}}}, "swap.op_swap['tanh'].layers: there is no layer 4: the layers"),
    ],
)
def test_a_layer_that_is_on_no_stage_is_found_when_they_meet(settings, swapped, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        scales(settings, swapped).meet()


@pytest.mark.parametrize(
    ("settings", "swapped", "message"),
    [
        ({"select": ["weights.0", "*.tanhh"]}, {},
            "recompute.select[1]: '*.tanhh' matches no Cell or operator: there are"),
        ({"full": True, "exclude": "weights.2"}, {},
            "recompute.exclude: 'weights.2' matches no Cell or operator: below 'weights' are '0-1'"),
        ({"select": ["weights.0-1", "weights.1-2"]}, {},
            "recompute.select[1]: 'weights.1-2' is only partly there: below"),
        ({}, {"op_swap": {".mul": {"layers": "0"}}},
            "swap.op_swap['.mul'].layers: nothing that '.mul' selects is in lay"),
        ({}, {"op_swap": {"mul": True, "muls": True}}, "swap.op_swap['muls']: 'muls' matches no Cell or"),
    ],
)  # fmt: skip
def test_a_pattern_that_matches_on_no_stage_is_found_in_the_first_run(settings, swapped, message):
    schedule = scales(settings, swapped)
    for _ in range(2):  # a second attempt is no better
        with pytest.raises(ValueError, match=re.escape(message)):
            schedule.run(X)
    assert not any(gradient.asnumpy().any() for stage in schedule.stages for gradient in stage.gradients)


def test_patterns_that_match_on_some_stage():
    """Of one stage an operator, of the other a Cell; evaluation asks for nothing, runs after the first neither."""
    asked = {"full": [1], "select": ["weights.0", ".reduce_mean"]}
    schedule = scales(asked, {"op_swap": {".mul": True}}, {"full": "0", "select": ".reduce_mean"})
    schedule.evaluate(X)
    prepare(schedule.stages[0].cell.weights["0"], Tensor(array(2, 4)))  # a program of a part
    schedule.run(X)
    schedule.meet()._from_all = None
    schedule.run(X)
    with pytest.raises(
        ValueError, match=r"'mean' matches no .*; looked for on stages \[0\] of 2: recompute\(\) or swap"
    ):
        pipeline([recompute(shard_of(Scale(0)), is_part=True, select="mean"), Scale(1, True)], 2).run(X)


def shard_of(cell):
    return shard(cell, init_device_mesh((1,), ("tp",))).set_train()


def test_recompute_after_the_stages_have_met():
    schedule = pipeline([shard_of(Scale(0)), shard_of(Scale(1, True))], 2)
    schedule.run(X)
    recompute(schedule.stages[1].cell, is_part=True, full=True)
    with pytest.raises(ValueError, match=r"called with the Cell of stage 1 after the stages had met: call it before"):
        schedule.run(X)


@pytest.mark.parametrize(
    ("settings", "swapped", "message"),
    [
        ({"select": ["weights.1", "*.tanh"]}, {},
            "recompute.select[1]: '*.tanh' matches no Cell of any stage, and compiled stages recompute whole Cells, no "
            "operators: there are "),
        ({"select": "weights.2"}, {}, "name Cells, or run in PyNative (recipe: context.mode: 1)"),
        ({"full": True, "exclude": "*.tanh"}, {}, "recompute.exclude: '*.tanh' matches no Cell of any stage"),
        ({"full": True, "mp_comm_recompute": False}, {}, "recompute.mp_comm_recompute: false: compiled functions"),
        ({"budget": 0.5}, {}, "recompute.budget: compiled functions can only recompute whole Cells: use"),
        ({"select": "**", "exclude": "weights.1"}, {}, "Cell 'weights.1' lies in '', which is recomputed, but "),
        ({}, {"op_swap": {"tanh": True}}, "swap: compiled functions can only recompute whole Cells"),
    ],
)  # fmt: skip
def test_what_compiled_stages_can_not_do_is_found_when_they_meet(settings, swapped, message):
    """Also of stages that have none of it, and would find nothing wrong."""
    with pytest.raises(ValueError, match=re.escape(message)):
        scales(settings, swapped, compiled=True).meet()
    with pytest.raises(ValueError, match=re.escape(message)):
        scales({}, swapped, settings, compiled=True).meet()


def test_operators_of_a_stage_that_is_not_compiled():
    """The pattern is for that one."""
    schedule = scales({"select": "mul"}, {}, {"select": "weights.1"})
    schedule.stages[1].compiled = True
    schedule.meet()
    schedule = scales({"select": "weights.1"}, {}, {"select": "mul"})
    schedule.stages[0].compiled = True
    schedule.meet()


def named():
    """A Cell whose layers have names that are no numbers."""
    layers = nn.CellDict([("first", nn.Dense(4, 4))])
    return shard_of(cell_of(lambda self, x: ops.mean(self.layers["first"](x)), layers=layers))


def test_layers_without_numbers_on_a_stage():
    cells = [shard_of(Scale(0)), named()]
    for cell in cells:
        recompute(cell, is_part=True, full=[0])
    with pytest.raises(ValueError, match=r"^recompute.full: 'layers.first' has no number, and its place on a stage"):
        pipeline(cells, 2).meet()


def check(stages="01", swapped=None, layers=LAYERS, shorts=(None, None), programs="01", **settings):
    """`check_stages` for a pipeline of two stages, of which only some were given these settings, or have programs."""
    settings, swapping = RecomputeSettings(**settings), SwapSettings(**(swapped or {}))
    summaries = []
    for stage in range(2):
        program = PROGRAMS[stage] if str(stage) in programs else None
        PROGRAMS[stage].layers = layers[stage]
        own = stage_summary(settings, swapping, layers[stage], PATHS[stage], program) | {"short": shorts[stage]}
        summaries.append(json.loads(json.dumps(own)) if str(stage) in stages else None)
    check_stages(settings, swapping, summaries)


def test_what_stages_know_of_each_other():
    check(select=["layers.1", "*.tanh", "mean"], exclude="layers.0")
    check(swapped={"op_swap": {"tanh": {"layers": "0-1"}}}, full="0-1", exclude="mean")
    check(programs="0", select="nothing")
    check(swapped={"swap": False, "op_swap": {"nothing": True}, "layer_swap": [{"layers": "2-3"}]})
    check(select=["*.tanh", "mean"], exclude="*.tanh")
    for given, message in (
        ({"select": ["*.tanh"], "exclude": "layers.*"},
            r"exclude: \['layers.\*'\] takes out all that is asked for by select \(\['\*.tanh'\]\), so nothing"),
        ({"select": "mean", "exclude": "**"}, "takes out all that is asked for by select"),
        ({"select": "layers.2"}, r"^recompute.select: 'layers.2' .* below 'layers' are '0-1'$"),
        ({"select": "layers.0.tan"}, r"below 'layers.0' are 'Tanh' \(did you mean 'Tanh'"),
        ({"full": [2], "programs": "0"}, r"^recompute.full: there is no layer 2: .* 0 to 1, 'layers.0-1'$"),
        ({"stages": "0", "full": "0-1"}, r"no layer 1: the layers are 0 to 0, .*; looked for on stages \[0\] of 2"),
        ({"stages": "0", "layers": ({}, {}), "full": True}, r"^recompute.full: the model .*; its Cells are 'l"),
        ({"select": ["layers.0-1", "layers.1-4"]},
            r"^recompute.select\[1\]: 'layers.1-4' is only partly there: .* '1', not '2-4'$"),
        ({"exclude": "*.0,7.tanh", "full": True}, "^recompute.exclude: .* is only partly there: there are"),
        ({"stages": "0", "select": "layers.0-1"}, r"below 'layers' are '0', not '1'; looked for on sta"),
        ({"swapped": {"op_swap": [{"op_name": "tanh", "layers": [n]} for n in (1, 0)]}},
            r"nothing that 'tanh' selects is in layers \[1\]$"),
        ({"swapped": {"op_swap": {"tanh": {"layers": [1]}}}}, r"nothing that 'tanh' selects is in layers \[1\]$"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            check(**given)


def test_layers_without_numbers_of_a_whole_model():
    """Their place is that in the model, also where what is asked for is checked only before gradients are taken."""
    cell = recompute(named(), full=[0]).set_train(False)
    with pytest.raises(ValueError, match="there is no layer 1"):
        recompute(named(), full=[1])
    ms.value_and_grad(cell, None, cell.trainable_params())(X)


def test_a_budget_is_out_of_reach_of_all_stages_together():
    """When their programs are made; the greatest least part of those that need more is that of all of them."""
    schedule = scales({"budget": 0.01}, {})
    given = {stage: ((X if stage == 0 else X,), {}) for stage in range(2)}
    with pytest.raises(ValueError, match=r"^recompute.budget: 0.01 is out of reach on stage \d: .* for all stages is"):
        schedule.meet().make_programs(schedule.table, given)
    with pytest.raises(ValueError, match=r"stage 0 .*, step F0@0: .* 0.01 is out of reach: .* for this stage is"):
        schedule.run(X)


def test_the_least_budget_of_all_stages():
    message = (
        "recompute.budget: 0.01 is out of reach on stage 1: with all computed again that may be, 9 B of 200 B stay;"
    )
    with pytest.raises(ValueError, match=f"^{message} the least budget for all stages is 0.045$"):
        check(shorts=([2, 100], [9, 200]), budget=0.01)
    check(budget=0.01)


def test_the_package_is_the_function_too():
    net = sharded(llama)
    assert mindformers_core.recompute(net, full=True) is net and tree_of(net).activations.settings.full is True
    assert mindformers_core.hsdp is hsdp and mindformers_core.swap is swap


@pytest.mark.parametrize(
    ("function", "settings", "kind", "message"),
    [
        (recompute, {"selct": "a"}, TypeError, r"^recompute.selct: unknown setting \(did you mean 'select'\?\); kno"),
        (recompute, {"settings": "a"}, TypeError, "takes a RecomputeSettings, or its keys by name, not 'a'"),
        (recompute, {"select": ["a", 3]}, TypeError, r"^recompute.select\[1\]: 3 should be a pattern"),
        (swap, {"default_prefetch": 3}, ValueError, r"^swap.default_prefetch: 3 is given, but nothing to swap"),
    ],
)
def test_errors_of_settings_begin_as_those_of_a_recipe(function, settings, kind, message):
    with pytest.raises(kind, match=message):
        function(sharded(Net), **settings)


def test_cells_that_run_eagerly_are_named_some():
    net = shard(llama().set_train(), init_device_mesh((1, 1), ("dp", "tp")), mode="eager")
    with pytest.raises(ValueError, match=r"^the root Cell \(.*: runs operator by operator \(eager\), where") as caught:
        recompute(net, full=True)
    assert str(caught.value).count("Cell '") == 4 and ", …: runs" in str(caught.value)


GATHERS = "recompute.parallel_optimizer_comm_recompute: True is about the gathered weights of hsdp(optimizer_level="


EXCLUDED = [
    ({"full": [1], "select": "*.mlp", "exclude": ["layers.1", "mlp"]}, "full ([1]) and select (['*.mlp']), so"),
    ({"full": True, "exclude": "**"}, "full (True), so nothing is recomputed: exclude less, or leave recompute out"),
    ({"full": [0, 2], "exclude": "layers.*"}, "full ([0, 2]), so"),
    ({"select": "*.mlp", "exclude": "*.mlp"}, "select (['*.mlp']), so"),
]


@pytest.mark.parametrize(("settings", "asked"), daily(EXCLUDED[:1], EXCLUDED))
def test_all_is_excluded(settings, asked):
    expected = re.escape(f" takes out all that is asked for by {asked}")
    for compiled in (False, True):
        with pytest.raises(ValueError, match=f"^recompute.exclude: .*{expected}"):
            prepare(recompute(sharded(llama), **settings), *INPUTS[llama](), compiled=compiled)
    net = recompute(sharded(llama), **settings).set_train(False)
    net(*INPUTS[llama]())
    with pytest.raises(ValueError, match=expected):
        ms.value_and_grad(net, None, net.trainable_params())(*INPUTS[llama]())


def test_operators_that_are_excluded():
    with pytest.raises(ValueError, match=r"takes out all that is asked for by select \(\['\*.silu'\]\)"):
        prepare(recompute(sharded(llama), select="*.silu", exclude="*.mlp.SiLU"), *INPUTS[llama]())
    prepare(recompute(sharded(llama), select=["*.self_attn", "*.mlp"], exclude="*.mlp"), *INPUTS[llama]())


@pytest.mark.parametrize("level", [None, "level2"])
def test_gathered_weights_at_other_levels(level):
    """In either order; where `hsdp()` may still come, a call without gradients is no error."""

    def told(net):
        return net if level is None else hsdp(net, optimizer_level=level)

    settings = {"full": True, "parallel_optimizer_comm_recompute": True}
    instead = f"optimizer_level is '{level}'" if level else "hsdp() wasn't called"
    expected = "^.*" + re.escape(f"{GATHERS}'level3'), but {instead}: leave it out, or use hsdp(")
    if level:
        with pytest.raises(ValueError, match=expected):
            recompute(told(sharded(Cast)), **settings)
    for compiled in (False, True):
        net = recompute(sharded(Cast), **settings)
        net(*INPUTS[Cast]())
        told(net)
        with pytest.raises(ValueError, match=expected):
            if level:
                value_and_grad(net, compiled)(*INPUTS[Cast]())
            else:
                ms.value_and_grad(net, None, net.trainable_params())(*INPUTS[Cast]())
    cells = [shard(Scale(number, number == 1), init_device_mesh((1,), ("dp",))) for number in range(2)]
    with pytest.raises(ValueError, match=expected):
        pipeline([told(recompute(cell, is_part=True, **settings)) for cell in cells], 2).meet()
    value_and_grad(hsdp(recompute(sharded(Cast), **settings), optimizer_level="level3"))(*INPUTS[Cast]())
    stays = recompute(sharded(Cast), full=True, parallel_optimizer_comm_recompute=False)  # true at every level
    value_and_grad(told(stays) if level else hsdp(stays, optimizer_level="level2"))(*INPUTS[Cast]())


@pytest.mark.parametrize("path", ["", "model.layers.0"])
def test_mindspore_s_own_recompute_afterwards(path):
    called = r"recompute\(\) or swap\(\) was called with the root Cell .* already: select .* there"
    for chosen in (recompute(sharded(llama), select="*.mlp"), swap(sharded(llama), op_swap={"*.mlp": True})):
        with pytest.raises(ValueError, match=called):
            dict(chosen.cells_and_names())[path].recompute()
    net = sharded(llama)
    net.model.layers["0"].recompute()
    with pytest.raises(ValueError, match="is recomputed by its own recompute"):
        recompute(net, full=True)
