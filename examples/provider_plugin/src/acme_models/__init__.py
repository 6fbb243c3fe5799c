"""Models for pagedllm."""
