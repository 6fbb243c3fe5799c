"""pagedllm for people who already use Hugging Face: the Hub as a source of models.

Owner: the Hugging Face integration. Invariant: it uses pagedllm's public API and its hook
specifications only.
"""
