"""Generated source: how each operator is written so that PyNative runs it and `@ms.jit` compiles it."""

from mindformers_core.tensor_parallel.generation.operator_source import Call, operator_source

__all__ = ["Call", "operator_source"]
