"""Calls of every operator with a rule, one entry each, by kind. A new operator is an entry in one of these files.

`CALLS` are those of each rule with which every layout is tried; `OTHERS` of operators that have the same rules, whose
source, local shapes and saved tensors are compared.
"""

from operator_calls import elementwise, float8, images, indexing, losses, products, reductions, shapes
from operator_calls.call import Call, is_many, local

__all__ = ["ALL_CALLS", "CALLS", "Call", "is_many", "local"]

_KINDS = elementwise, products, reductions, shapes, indexing, images, losses, float8
CALLS = [call for kind in _KINDS for call in kind.CALLS]
ALL_CALLS = [*CALLS, *(call for kind in _KINDS for call in kind.OTHERS)]
