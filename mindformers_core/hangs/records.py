"""What is known about every rank when a hang is reported: plain data. Pure Python."""

import signal
from dataclasses import dataclass

__all__ = ["Issued", "RankState"]

_CONDITIONS = {
    "dead": "has died (its process is gone)",
    "stopped": "is stopped (by SIGSTOP or a debugger)",
    "ended": "has ended",
}


@dataclass(frozen=True)
class Issued:
    """A collective, a wait for a message or a call of a compiled function, which a rank has begun.

    Attributes:
        rank: the rank.
        number: of the call among all calls of these ranks in this job, from 0; of a message None.
        kind: `"all_reduce"`, …, `"receive"`, `"compiled"`, or `"compiling"` (the first call of a compiled function).
        axes: the mesh axes.
        ranks: the global ranks that take part; of a message `(sender, receiver)`.
        shape, dtype: of this rank's tensor; `()` and `""` without one.
        place: the Cell and the line of source, as text.
        plan: the number in the plan, `"#17"` or `"backward of #17"`; `""` outside of a plan.
        done: whether the rank has finished it.
        seconds: time since its beginning.
        options: further arguments that all ranks have to agree on, as text.
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
    done: bool = False
    seconds: float = 0.0
    options: str = ""

    @property
    def call(self):
        """What identifies the call on all its ranks."""
        return self.ranks, self.number

    @property
    def signature(self):
        """What has to be equal on all ranks of the call."""
        return self.kind, self.shape, self.dtype, self.options, "" if self.plan.startswith("backward") else self.plan

    @property
    def label(self):
        """The shortest name: kind, number and axes."""
        if self.kind == "receive":
            return f"receive from rank {self.ranks[0]}"
        if self.kind.startswith("compil"):
            return f"{'compiled' if self.kind == 'compiled' else 'first call of compiled'} function {self.place}"
        number = f" {self.plan}" if self.plan else ""
        return f"{self.kind}{number} over {' and '.join(self.axes) or 'no axis'}"

    @property
    def label_with_call(self):
        """The label, and for a collective the number of the call."""
        counts = self.number is not None and not self.kind.startswith("compil")
        return f"{self.label} (call {self.number})" if counts else self.label

    @property
    def described(self):
        """All that is known of it, without the rank."""
        text = self.label_with_call
        if text != self.label:
            text += f", {self.dtype} {list(self.shape)}{' ' * bool(self.options)}{self.options}"
        if self.place and not self.kind.startswith("compil"):
            text += f", for {self.place}"
        return text


@dataclass(frozen=True)
class RankState:
    """One rank, as the board and the system show it.

    Attributes:
        rank: the rank.
        state: `"running"`, `"stopped"` (by SIGSTOP or a debugger), `"dead"` (the process is gone) or `"ended"` (by
            itself: it left the job).
        history: the last `Issued`, oldest first.
        stack: its Python stack, innermost first, as `file:line in function`; empty where the rank can't answer.
        exit_code: of a dead rank, minus the number of the signal that killed it; 0 if unknown.
    """

    rank: int
    state: str = "running"
    history: tuple = ()
    stack: tuple = ()
    exit_code: int = 0

    @property
    def current(self):
        """The `Issued` that the rank is in; None where it is in other Python code, or has ended."""
        last = self.history[-1] if self.history else None
        return None if last is None or last.done else last

    @property
    def condition(self):
        """The state as the predicate of a sentence; "" of a running rank."""
        if self.exit_code:
            by = f"was killed by {signal.Signals(-self.exit_code).name}" if self.exit_code < 0 else ""
            return by or f"has died with exit code {self.exit_code}"
        return _CONDITIONS.get(self.state, "")

    def has_issued(self, wanted):
        """Whether the rank has issued the call of another rank's `Issued`, or a later one of the same ranks."""
        return any(one.ranks == wanted.ranks and one.number >= wanted.number for one in self.history
                   if one.number is not None and wanted.number is not None)  # fmt: skip
