"""One step of a pipeline schedule (RFC ICY7S6): its type, micro-batch and stage. Pure Python."""

import re
from enum import IntEnum
from typing import NamedTuple


class MetaStepType(IntEnum):
    """The type of a step.

    A stage's backward pass is one `BWD`; or it is split, so that the stage before can go on sooner, into a `BWD_INPUT`
    (gradient of the stage's input) and a later `BWD_WEIGHT` (gradients of its weights; Qi et al., "Zero bubble pipeline
    parallelism", 2023). `FWD_SEND` sends a stage's output to the next stage, which receives it by `FWD_RECV`;
    `BWD_SEND` sends the gradient of a stage's input to the stage before, which receives it by `BWD_RECV`. `OVERLAP` is
    a forward and a backward step whose computation and communication a device may interleave (DualPipe, DeepSeek-AI
    2024).
    """

    FWD = 0
    BWD = 1
    BWD_INPUT = 2
    BWD_WEIGHT = 3
    FWD_RECV = 4
    FWD_SEND = 5
    BWD_RECV = 6
    BWD_SEND = 7
    OVERLAP = 8


COMPUTE = (MetaStepType.FWD, MetaStepType.BWD, MetaStepType.BWD_INPUT, MetaStepType.BWD_WEIGHT)
FORWARD = (MetaStepType.FWD, MetaStepType.FWD_SEND, MetaStepType.FWD_RECV)
SENDS = (MetaStepType.FWD_SEND, MetaStepType.BWD_SEND)
OTHER_ENDS = {  # type of a send or receive -> type of the step at the other end, and its stage minus this one's
    MetaStepType.FWD_SEND: (MetaStepType.FWD_RECV, 1),
    MetaStepType.FWD_RECV: (MetaStepType.FWD_SEND, -1),
    MetaStepType.BWD_SEND: (MetaStepType.BWD_RECV, -1),
    MetaStepType.BWD_RECV: (MetaStepType.BWD_SEND, 1),
}
_LETTERS = ("F", "B", "I", "W", "RF", "SF", "RB", "SB")  # by the type's number; an OVERLAP is its parts, joined by +
_TYPES = {letters: MetaStepType(number) for number, letters in enumerate(_LETTERS)}
_TEXT = re.compile(r"([A-Z]+)(\d+)@(\d+)")


class MetaStep(NamedTuple):
    """One step; `str` returns its text, `F3@1`: forward of micro-batch 3 on stage 1.

    Attributes:
        micro_index: number of the micro-batch, from 0; None for `OVERLAP`.
        type: a `MetaStepType`.
        stage_index: number of the stage, from 0, over all ranks; None for `OVERLAP`.
        sub_steps: the steps of an `OVERLAP`, in the order in which they run where nothing overlaps.
    """

    micro_index: int | None
    type: MetaStepType
    stage_index: int | None
    sub_steps: tuple = ()

    def __str__(self):
        if self.type == MetaStepType.OVERLAP:
            return "+".join(map(str, self.sub_steps))
        return f"{_LETTERS[self.type]}{self.micro_index}@{self.stage_index}"

    @property
    def other_end(self):
        """The receiving step of a sending one, and the sending step of a receiving one."""
        kind, distance = OTHER_ENDS[self.type]
        return MetaStep(self.micro_index, kind, self.stage_index + distance)


def overlapped(*steps):
    """The `OVERLAP` of steps."""
    return MetaStep(None, MetaStepType.OVERLAP, None, steps)


def plain_steps(order):
    """The steps of an order, with the parts of an `OVERLAP` one after another."""
    for step in order:
        yield from step[3] or (step,)


def step_parts(kind, stage):
    """The (type, stage) that a step completes: a BWD completes BWD_INPUT and BWD_WEIGHT."""
    if kind == MetaStepType.BWD:
        return (MetaStepType.BWD_INPUT, stage), (MetaStepType.BWD_WEIGHT, stage)
    return ((kind, stage),)


def step_from_text(text):
    """Parse the text of a step: `F3@1`, or `F5@0+B3@3` for an overlap.

    Raises:
        ValueError: not the text of a step; names the letters that are known.
    """
    parts = [_TEXT.fullmatch(part.strip()) for part in text.split("+")]
    if not all(parts) or any(part[1] not in _TYPES for part in parts):
        known = ", ".join(f"{letters} ({kind.name})" for letters, kind in _TYPES.items())
        raise ValueError(
            f"{text!r} is no step: write letters, micro-batch, @ and stage, as F3@1, or several joined by +; letters: "
            f"{known}"
        )
    steps = tuple(MetaStep(int(part[2]), _TYPES[part[1]], int(part[3])) for part in parts)
    return steps[0] if len(steps) == 1 else overlapped(*steps)
