"""An agent that calls tools: the model says what to call, a grammar holds it to the schema.

Small models hardly ever call a tool of their own accord, so the first turn requires a call.
"""

from __future__ import annotations

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import tool

from pagedllm import ChatPagedLLM


@tool
def get_weather(city: str) -> str:
    """Look up the weather in a city."""
    return f"In {city} it is sunny, 21 degrees."


@tool
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


TOOLS = {each.name: each for each in (get_weather, add)}


def run(question: str, turns: int = 3) -> list[BaseMessage]:
    """Let the model call tools and see their results until it answers in words."""
    chat = ChatPagedLLM(model_id="smollm2", temperature=0, max_tokens=64)
    must_call = chat.bind_tools([*TOOLS.values()], tool_choice="any", parallel_tool_calls=False)
    may_call = chat.bind_tools([*TOOLS.values()])
    messages: list[BaseMessage] = [HumanMessage(question)]
    for turn in range(turns):
        answer = (may_call if turn else must_call).invoke(messages)
        messages.append(answer)
        if not answer.tool_calls:
            break
        messages += [TOOLS[call["name"]].invoke(call) for call in answer.tool_calls]
    return messages


def main() -> None:
    """Ask about the weather and print the whole conversation."""
    for message in run("What is the weather in Paris?"):
        for call in getattr(message, "tool_calls", ()):
            print(f"calls: {call['name']}({call['args']})")
        if message.content:
            print(f"{message.type}: {message.content}")


if __name__ == "__main__":
    main()
