"""Words to the terminal as they are generated, and what they cost."""

from __future__ import annotations

from langchain_core.messages import AIMessageChunk

from pagedllm import ChatPagedLLM


def main() -> None:
    """Stream a story; Ctrl-C, or leaving the loop, frees what it used at once."""
    chat = ChatPagedLLM(model_id="smollm2", temperature=0.7, seed=1, max_tokens=60)
    whole: AIMessageChunk | None = None
    for chunk in chat.stream("Tell me a very short story about a lighthouse."):
        print(chunk.content, end="", flush=True)
        whole = chunk if whole is None else whole + chunk
    print()
    if whole is not None:
        print(whole.usage_metadata, whole.response_metadata["finish_reason"])


if __name__ == "__main__":
    main()
