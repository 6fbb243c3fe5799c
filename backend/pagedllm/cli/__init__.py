"""The ``pagedllm`` command."""
