"""The facade for asyncio.

Owner: the public API. Invariant: nothing here blocks the event loop but the constructor, for
which :meth:`AsyncLLM.create` stands in.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pagedllm.client import Client, Messages
from pagedllm.engine.intake import as_list
from pagedllm.engine.streams import AsyncOutputStream, Waker
from pagedllm.outputs import EmbeddingOutput

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from pagedllm.config import Config
    from pagedllm.engine.intake import Prompt
    from pagedllm.sampling_params import SamplingParams
    from pagedllm.types import Pooling, Request


class AsyncLLM(Client):
    """A model behind an engine, for asyncio.

    The constructor loads the model and blocks; :meth:`create` does so in a thread.

    Example::

        async with await AsyncLLM.create("smollm2") as llm:
            async for output in llm.generate("Once upon a time"):
                print(output.outputs[0].text_delta, end="")
    """

    @classmethod
    async def create(cls, model: str | Config | None = None, **settings: Any) -> Self:
        """Construct without blocking the event loop."""
        import asyncio

        return await asyncio.to_thread(cls, model, **settings)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncOutputStream:
        """Return an async iterator over a request's growing output.

        Each item is a snapshot; ``outputs[0].text_delta`` is what it adds. Cancelling the
        task that waits for an item aborts the request; so does closing or dropping the
        iterator.

        Raises:
            ValidationError: at once, when the request cannot be served.
        """
        return self.submit(
            self.prepare(
                prompt,
                sampling_params,
                request_id=request_id,
                priority=priority,
                cache_salt=cache_salt,
            )
        )

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        ttft_target: float | None = None,
        e2e_target: float | None = None,
    ) -> Request:
        """Do what :meth:`generate` does first: tokenise, check, compile a constraint.

        Any thread may call it, so that a long prompt or a large grammar need not hold up the
        event loop; :meth:`submit` starts what it returns.

        ``ttft_target`` and ``e2e_target`` are the seconds from now within which the first
        token and the whole answer are wanted, for ``scheduling_policy='deadline'``.

        Raises:
            ValidationError: the request cannot be served.
        """
        return self._intake.request(
            prompt,
            sampling_params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            ttft_target=ttft_target,
            e2e_target=e2e_target,
        )

    def submit(self, request: Request) -> AsyncOutputStream:
        """Start a request of :meth:`prepare`; as :meth:`generate` from there on."""
        import asyncio

        events = asyncio.get_running_loop()
        waker = self._wakers.get(events)
        if waker is None:
            waker = self._wakers[events] = Waker(events)
        return AsyncOutputStream(self._entry, partial(self._submit, request), waker)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncOutputStream:
        """Answer a conversation as :meth:`generate` does, with the options of ``LLM.chat``."""
        chat = self.prepare_chat(messages, sampling_params, **options)
        return self.generate(chat.prompt_token_ids, chat.params, request_id=request_id)

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling,
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> list[EmbeddingOutput]:
        """Turn each prompt into a vector, as :meth:`LLM.embed` does."""
        import asyncio

        requests = [self.prepare_embedding(p, pooling=pooling) for p in as_list(prompts)]
        outputs = await asyncio.gather(*(anext(self.submit(each)) for each in requests))
        return [EmbeddingOutput.of(each, normalize, dimensions) for each in outputs]

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator's last item says ``finish_reason='abort'``."""
        self._entry.abort(request_id)

    async def aclose(self) -> None:
        """Close without blocking the event loop."""
        import asyncio

        await asyncio.to_thread(self._close)

    def close(self) -> None:
        """Free the model, its cache and its thread; unfinished requests fail. Idempotent."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
