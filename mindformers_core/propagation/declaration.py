"""What is declared for one Cell and for the operators that it calls, as plain data. Pure Python."""

from dataclasses import dataclass, field

__all__ = ["Declaration", "OperatorDeclaration"]


@dataclass(frozen=True)
class OperatorDeclaration:
    """What is declared for one operator: the primitive that a Cell keeps under some name (`self.matmul`).

    Attributes:
        inputs, outputs: None, or a tuple with one entry for every tensor that the operator takes or gives: None to
            derive it, a layout (`LayoutSpec`, `Layout`, `mindspore.Layout`), or a *strategy*, a tuple that says for
            every dim into how many parts it is cut.
    """

    inputs: tuple | None = None
    outputs: tuple | None = None


@dataclass(frozen=True)
class Declaration:
    """What is declared for one Cell.

    Attributes:
        inputs: argument name of `construct` -> layout.
        outputs: position (or key, where `construct` returns a dict) -> layout.
        weights: name of one of the Cell's own parameters -> layout.
        operators: name of a primitive among the Cell's attributes -> `OperatorDeclaration`.
    """

    inputs: dict = field(default_factory=dict)
    outputs: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)
    operators: dict = field(default_factory=dict)
