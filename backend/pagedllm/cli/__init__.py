"""The ``pagedllm`` command: a thin layer over the public API."""
