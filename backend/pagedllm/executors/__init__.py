"""Executors: who runs the steps, and where.

Owner: the engine, which knows :mod:`pagedllm.executors.base` alone.
"""
