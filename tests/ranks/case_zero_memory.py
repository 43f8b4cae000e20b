"""What a step under `hsdp()` takes and sends on a rank: measured, computed, and by the formulas of the ZeRO paper."""

import mindspore as ms
import numpy as np
import psutil
from mindspore import Tensor, nn
from support.launch import on_ranks

from mindformers_core.communication import count_collectives
from mindformers_core.optimizers.adamw import AdamW
from mindformers_core.pipeline import PipelineStage, Schedule1F1B
from mindformers_core.sharding.sharded_cells import tree_of
from mindformers_core.tensor_parallel import explain
from mindformers_core.zero import MixedPrecision, hsdp, memory_report, value_and_grad
from mindformers_core.zero.explained import explained_lines
from mindformers_core.zero.formulas import traffic_of_step

SIZE, LAYERS, RANKS = 192, 8, 4
WEIGHTS, BIASES = LAYERS * SIZE * SIZE, LAYERS * SIZE  # biases are under the threshold of 1 KB
MIXED = MixedPrecision(parameter="float32", compute="float16", gradient="float16")
PAPER = {"float32": (4, 4, 8), "mixed": (2, 2, 12)}  # bytes of an element: weight, gradient, K: the rest
LEVELS = {"plain": (1, "level1"), "level1": (4, "level1"), "level2": (4, "level2"), "level3": (4, "level3")}
SHARDED = {**LEVELS, "replicas": (2, "level2")}


class Tower(nn.Cell):
    """Square layers, (batch, SIZE) → a loss."""

    def __init__(self):
        super().__init__()
        ms.set_seed(1)
        self.layers = nn.CellList([nn.Dense(SIZE, SIZE) for _ in range(LAYERS)])

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def formula(policy, level):
    """The ZeRO paper's bytes of a rank's model states, sections 5.1 to 5.3, for the weights; all of the biases."""
    weight, gradient, rest = PAPER[policy]
    whole = weight + gradient + rest
    cut = {
        "plain": whole,
        "level1": weight + gradient + rest / RANKS,
        "level2": weight + (gradient + rest) / RANKS,
        "level3": whole / RANKS,
    }[level]
    return WEIGHTS * cut + BIASES * whole


class _Mean(nn.Cell):
    """The loss."""

    def construct(self, x):
        return x.mean()


class Training:
    """A tower, its optimizer, and steps.

    Attributes:
        report: the `MemoryReport` after a step, while its gradients are held.
        counts: what the last step has sent.
    """

    def __init__(self, policy, level, compiled=False, as_stage=False, **options):
        shard_size, name = SHARDED[level]
        options = {"mixed_precision": MIXED if policy == "mixed" else None, "comm_fusion": 0.1, **options}
        self.cell = hsdp(Tower(), shard_size, 1, name, **options)
        self.optimizer = AdamW(self.cell.trainable_params())
        made = stage_gradients if as_stage else value_and_grad
        self.gradient_of, self.compiled = made(self.cell, compiled), compiled

    def steps(self, number):
        x = Tensor(np.ones((2, SIZE), np.float32))
        for index in range(number):
            self.gradients = None
            with count_collectives() as self.counts:
                while self.gradients is None:
                    _, self.gradients = self.gradient_of(x)
            self.optimizer(self.gradients, *self.optimizer.scalars(index + 1, 1e-3))
        self.report = memory_report(self.cell, self.optimizer, compiled=self.compiled)
        return self


def stage_gradients(cell, compiled):
    """As `value_and_grad`, by the runs of a pipeline of one stage."""
    schedule = Schedule1F1B(PipelineStage(cell, 0, 1, compiled=compiled), 1)

    def gradient_of(x):
        loss, (stage,) = schedule.run(x), schedule.stages
        if stage.weight_gradients.runs < tree_of(cell).storage.settings.accumulate_grad_step:
            return loss, None
        gradients = stage.gradients
        stage.zero_gradients()
        return loss, gradients

    return gradient_of


def resident_megabytes():
    """Of this process."""
    return psutil.Process().memory_info().rss / 2**20


@on_ranks(4)
def case_measured_memory_is_that_of_the_formulas():
    """Of both policies, at all levels, at both times as computed; and the paper's formula with what is listed besides:
    buffers, and what comes and goes. At level 3 the optimizer's step takes the most, else the end of the pass."""
    for policy in PAPER:
        for level in ("plain", "level1", "level3") if policy == "mixed" else ("level2",):
            report = Training(policy, level).steps(1).report
            for moment, measured in report.measured.items():
                message = f"{policy} {level} {moment}\n{measured}\n{report.computed[moment]}"
                np.testing.assert_allclose(measured.total, report.computed[moment].total, rtol=0.02, err_msg=message)
            moment = "update" if level == "level3" else "pass"
            expected = formula(policy, level) + report.computed[moment].buckets + report.computed[moment].passing
            if level in ("plain", "level2"):  # of the last bucket's gradients the whole is there, and no result yet
                expected -= SIZE * SIZE * PAPER[policy][1] / (RANKS if level == "level2" else 1)
            np.testing.assert_allclose(report.measured[moment].total, expected, rtol=0.02, err_msg=message)
            np.testing.assert_allclose(report.states, formula(policy, level), rtol=1e-3, err_msg=message)
            assert len(report.whole) == (2 * LAYERS if level == "plain" else LAYERS)


BY_DAY = (("mixed", "level3", {"accumulate_grad_step": 2, "prefetch": 2}),)
BY_NIGHT = (
    ("float32", "level2", {"accumulate_grad_step": 4}),
    ("float32", "level1", {"accumulate_grad_step": 3, "comm_fusion": 0.2}),
    ("mixed", "level2", {"accumulate_grad_step": 2, "gradient_accumulation_shard": False}),
    ("mixed", "replicas", {"accumulate_grad_step": 2}),
    ("float32", "level3", {"reshard_after_forward": False}),
    ("float32", "level2", {"compiled": True}),
)


@on_ranks(4)
def case_measured_memory_and_traffic_of_other_steps(rows=BY_DAY):
    """Micro-steps, kept weights, one bucket for all, a compiled function; replicas: what a step sends, to the byte. The
    runs of a pipeline of one stage take and send the same, and give the same gradients."""
    for policy, level, options in rows:
        steps = 1 + ("prefetch" in options)  # what comes ahead is known from the second step on
        training = Training(policy, level, **options).steps(steps)
        for moment, measured in training.report.measured.items():
            computed = training.report.computed[moment]
            message = f"{policy} {level} {options} {moment}\n{measured}\n{computed}"
            np.testing.assert_allclose(measured.total, computed.total, rtol=0.02, err_msg=message)
        if options.get("accumulate_grad_step") == 4:  # besides the gradients of one bucket, sums of parts
            fullest = training.report.computed["pass"]
            assert fullest.gradients - fullest.passing <= (WEIGHTS / RANKS + BIASES) * 4
        sent = {}
        for (kind, _), counted in training.counts.items():
            sent[kind] = tuple(map(sum, zip(sent.get(kind, (0, 0)), counted)))
        expected = {}
        for (_, kind), counted in traffic_of_step(training.report.step).items():
            expected[kind] = tuple(map(sum, zip(expected.get(kind, (0, 0)), counted)))
        assert sent == expected, (policy, level, options)
        if level == "replicas" or "prefetch" in options:
            stage = Training(policy, level, as_stage=True, **options).steps(steps)
            assert (stage.report.measured, stage.counts) == (training.report.measured, training.counts), options
            for one, other in zip(stage.gradients, training.gradients, strict=True):
                np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())
        said = explain(training.cell)
        assert all(line in said for line in explained_lines(training.report.step))


@on_ranks(nightly=(4,))
def case_measured_memory_and_traffic_of_more_steps():
    case_measured_memory_and_traffic_of_other_steps(BY_NIGHT)


@on_ranks(nightly=(2,))
def case_memory_that_is_given_back_goes_to_the_system():
    """Whole weights, 64 MB, come and go twice a step: nothing of them stays. Daily, on one: `test_zero_memory`."""
    size = 1024
    cell = nn.SequentialCell(*[nn.Dense(size, size, weight_init="ones") for _ in range(16)], _Mean())
    hsdp(cell, 2, 1, "level3")
    gradient_of = value_and_grad(cell)
    x = Tensor(np.zeros((1, size), np.float32))
    resident = []
    for _ in range(5):
        gradient_of(x)
        resident.append(resident_megabytes())
    assert max(resident[2:]) < resident[1] + 32, resident
