"""Operators as other operators, and as source code that PyNative runs and `@ms.jit` compiles."""
