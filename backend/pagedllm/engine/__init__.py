"""The engine: from requests to steps and from tokens to text.

Owner: :class:`~pagedllm.engine.engine.Engine`, which runs in one thread.
"""
