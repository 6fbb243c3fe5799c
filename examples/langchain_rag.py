"""Retrieval: the passages nearest to a question go into the prompt.

The embedding is a bag of words, so that nothing has to be downloaded; any of LangChain's
takes its place.
"""

from __future__ import annotations

import re
import zlib

from langchain_core.embeddings import Embeddings
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from pagedllm import ChatPagedLLM

PASSAGES = [
    "The library opens at nine in the morning and closes at eight in the evening.",
    "The swimming pool is closed on Mondays.",
    "Dogs are welcome in the park, on a lead.",
]


class BagOfWords(Embeddings):
    """Counts words in buckets."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return a vector for each text."""
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """Return a vector; words of up to three letters count for nothing."""
        counts = [1e-6] * 256
        for word in re.findall(r"\w{4,}", text.lower()):
            counts[zlib.crc32(word.rstrip("s").encode()) % 256] += 1.0
        return counts


def main() -> None:
    """Answer a question from the passage that fits it."""
    store = InMemoryVectorStore.from_texts(PASSAGES, BagOfWords())
    retriever = store.as_retriever(search_kwargs={"k": 1})
    prompt = ChatPromptTemplate.from_template(
        "Answer from this text alone:\n{context}\n\nQuestion: {question}"
    )
    chain = (
        {
            "context": retriever | (lambda found: "\n".join(d.page_content for d in found)),
            "question": RunnablePassthrough(),
        }
        | prompt
        | ChatPagedLLM(model_id="smollm2", temperature=0, max_tokens=32)
        | StrOutputParser()
    )
    question = "When does the library open?"
    print("Found: ", retriever.invoke(question)[0].page_content)
    print("Answer:", chain.invoke(question))


if __name__ == "__main__":
    main()
