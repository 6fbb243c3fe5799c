"""A chain of a prompt, a local model and a parser: one call, a batch, a stream."""

from __future__ import annotations

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

from pagedllm import ChatPagedLLM


def main() -> None:
    """Ask about one animal, then about three at once, then word by word."""
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer in one short sentence."), ("human", "What do {animal} eat?")]
    )
    chat = ChatPagedLLM(model_id="smollm2", temperature=0, max_tokens=24)
    chain = prompt | chat | StrOutputParser()
    print("one:  ", chain.invoke({"animal": "cats"}))
    # All three are in the engine together.
    for answer in chain.batch([{"animal": "cows"}, {"animal": "owls"}, {"animal": "bees"}]):
        print("batch:", answer)
    print("stream: ", end="")
    for piece in chain.stream({"animal": "mice"}):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
