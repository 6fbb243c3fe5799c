"""GGUF files as models for pagedllm.

Owner: pagedllm-gguf. Invariant: importing it loads nothing heavy.
"""
