"""What is known about every rank when a hang is reported: plain data. Pure Python."""

import signal
from dataclasses import dataclass

_CONDITIONS = {
    "dead": "has died (no process)",
    "stopped": "is stopped (by SIGSTOP or a debugger)",
    "ended": "has ended",
    "absent": "has not called it on this host",
}
_COMPILED = {"compiled": "compiled function", "compiling": "first call of compiled function"}


@dataclass(frozen=True)
class Issued:
    """A collective, a wait for a message or for the start, or a call of a compiled function, which a rank has begun.

    Attributes:
        number: of the call among all calls of these ranks, or of the compiled function, in this job, from 0; else None.
        kind: `"all_reduce"`, …, `"receive"`, `"start"` (the wait for all ranks), `"compiled"`, or `"compiling"` (the
            first call of a compiled function).
        axes: the mesh axes.
        ranks: the global ranks that take part; of a message `(sender, receiver)`.
        shape, dtype: of this rank's tensor; `()` and `""` without one.
        place: the Cell and the line of source, as text.
        plan: the number in the plan, `"#17"` or `"backward of #17"`; `""` outside of a plan.
        options: further arguments that all ranks have to agree on, as text.
        done: whether the rank has finished it.
    """

    rank: int
    number: int | None
    kind: str
    axes: tuple
    ranks: tuple
    shape: tuple = ()
    dtype: str = ""
    place: str = ""
    plan: str = ""
    options: str = ""
    done: bool = False

    @property
    def call(self):
        """What identifies the call on all its ranks."""
        return self.ranks, self.number

    @property
    def signature(self):
        """What has to be equal on all ranks of the call.

        Without the plan's number of a backward pass, which follows from calls before it, whose order may differ.
        """
        plan = "" if self.plan.startswith("backward") else self.plan
        return self.kind, self.axes, self.shape, self.dtype, self.options, plan

    @property
    def plan_number(self):
        """The number in the plan, the last one of several; 0 outside of a plan."""
        return int(self.plan.rpartition("#")[2] or 0)

    @property
    def label(self):
        """The shortest name: kind, number in the plan and axes; sender; or compiled function."""
        if self.kind == "receive":
            return f"receive from rank {self.ranks[0]}"
        if self.kind == "start":
            return "init_distributed()"
        if self.kind in _COMPILED:
            return f"{_COMPILED[self.kind]} {self.place}"
        plan = f" {self.plan}" if self.plan else ""
        return f"{self.kind}{plan} over {' and '.join(self.axes) or 'no axis'}"

    @property
    def purpose(self):
        """The place as the end of a sentence; "" where the label has it."""
        return f" for {self.place}" if self.place and self.kind not in _COMPILED else ""

    @property
    def described(self):
        """All that is known of it, without the rank."""
        tensor = f"{self.dtype} {list(self.shape)} {self.options}".rstrip() if self.ranks else ""
        call = "" if self.number is None else f" (call {self.number}){', ' * bool(tensor)}{tensor}"
        return f"{self.label}{call}{',' * bool(self.purpose)}{self.purpose}"


@dataclass(frozen=True)
class RankState:
    """One rank, as the board and the system show it.

    Attributes:
        state: `"running"`, `"stopped"` (by SIGSTOP or a debugger), `"dead"` (the process is gone), `"ended"` (by
            itself: it left the job) or `"absent"` (it has not joined).
        history: the last `Issued`, oldest first.
        stack: its Python stack, innermost first, as `file:line in function`; empty where the rank can't answer.
        exit_code: of a dead rank, minus the number of the signal that killed it; 0 if unknown.
        error: the error by which it ends, as text; "" without one.
        computed: CPU seconds for a second that it has been in its compiled function; 0 outside of one.
    """

    rank: int
    state: str = "running"
    history: tuple = ()
    stack: tuple = ()
    exit_code: int = 0
    error: str = ""
    computed: float = 0.0

    @property
    def current(self):
        """The `Issued` that the rank is in; None where it is in other Python code, or has ended."""
        return self.history[-1] if self.history and not self.history[-1].done else None

    @property
    def condition(self):
        """The state as the predicate of a sentence; "" of a running rank."""
        if self.error:
            return f"has failed with {self.error}"
        if self.exit_code < 0:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        return f"has died with exit code {self.exit_code}" if self.exit_code else _CONDITIONS.get(self.state, "")

    def has_issued(self, wanted):
        """Whether the rank has issued the call of another rank's `Issued`, or a later one of the same ranks.

        Of a compiled function the collectives aren't known: whether the rank is in any call.
        """
        if wanted.kind == "start":
            return bool(self.history)
        calls = (one for one in self.history if None not in (one.number, wanted.number))
        issued = any(one.ranks == wanted.ranks and one.number >= wanted.number for one in calls)
        return issued if wanted.ranks else self.current is not None
