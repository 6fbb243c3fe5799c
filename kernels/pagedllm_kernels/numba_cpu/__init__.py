"""Kernels for CPUs, compiled by Numba at run time: no compiler, no C.

Owner: pagedllm_kernels. A step is a *program*: a table of operations (embed, norm, linear,
attend, ...) whose operands are addresses, run by one compiled function on every core at once.
So one compilation serves every model, and a single attention call is a program of three
operations.

- ``simd``: vectors of 16 floats as a Numba type, memory, atomics.
- ``tiles``: register tiles of the matrix products, emitted as LLVM vector IR.
- ``linear``, ``attend``, ``rows``: the operations, on addresses.
- ``interpreter``: the compiled function that runs a program.
- ``program``: the table, built in Python. ``team``: the threads. ``compiler``: its cache.
- ``attention``: :class:`NumbaAttention`, the attention backend.
"""
