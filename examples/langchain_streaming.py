"""Words to the terminal as they are generated, and what they cost."""

from __future__ import annotations

from pagedllm import ChatPagedLLM


def main() -> None:
    """Stream a story; Ctrl-C, or leaving the loop, frees what it used at once."""
    chat = ChatPagedLLM(model_id="smollm2", temperature=0.7, seed=1, max_tokens=60)
    for chunk in chat.stream("Tell me a very short story about a lighthouse."):
        print(chunk.content, end="", flush=True)
    # The last chunk says how it ended and what it used.
    print("\n", chunk.usage_metadata, chunk.response_metadata["finish_reason"])


if __name__ == "__main__":
    main()
