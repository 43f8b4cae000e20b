"""Generated source: how each operator is written so that PyNative runs it and `@ms.jit` compiles it."""
