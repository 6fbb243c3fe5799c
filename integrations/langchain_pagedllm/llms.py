"""The LangChain LLM: text in, text out, many prompts as one batch.

Owner: the LangChain integration. Invariants: all prompts of a ``batch`` reach the engine
together; streaming and asyncio go to the engine's own streams, so nothing arrives late or in
one piece.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

from langchain_pagedllm.base import PagedModel
from langchain_pagedllm.results import logprobs_content, token_usage
from pagedllm import EngineError, ValidationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from langchain_core.callbacks import (
        AsyncCallbackManagerForLLMRun,
        CallbackManagerForLLMRun,
    )
    from langchain_core.language_models.base import LangSmithParams

    from pagedllm import RequestOutput, SamplingParams


class PagedLLM(PagedModel, BaseLLM):
    """A local model as a LangChain LLM.

    Example::

        llm = PagedLLM(model_id="smollm2", temperature=0, max_tokens=32)
        llm.invoke("The capital of France is")
        llm.batch(["Water boils at", "Snow is"])        # one batch in the engine
        for text in llm.stream("Once upon a time"):
            print(text, end="", flush=True)

    A call takes the sampling fields as keywords (``llm.invoke(prompt, temperature=0)``);
    unknown ones raise. The text is continued as it is: for instructions use
    :class:`ChatPagedLLM`.
    """

    @property
    def _llm_type(self) -> str:
        return "pagedllm"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self.identifying

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params.update(self.tracing(stop, kwargs))  # type: ignore[typeddict-item]
        return params

    def get_token_ids(self, text: str) -> list[int]:
        """Return a text's tokens in the model's own vocabulary, without special ones added."""
        return list(self.engine.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _params(self, stop: Sequence[str] | None, options: dict[str, Any]) -> SamplingParams:
        params = self.call_params(stop, options)
        self.refuse(options)
        return params

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        params = self._params(stop, kwargs)
        llm = self.engine
        if self.timeout is None:
            return self._result(llm.generate(prompts, params, use_tqdm=False))
        streams = [llm.stream(prompt, params) for prompt in prompts]
        with self.deadline(llm, streams):
            outputs = [list(stream)[-1] for stream in streams]
        return self._result(outputs)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        params = self._params(stop, kwargs)
        llm = await self.aengine()
        requests = await asyncio.to_thread(lambda: [llm.prepare(p, params) for p in prompts])
        streams = [llm.submit(request) for request in requests]

        try:
            async with asyncio.timeout(self.timeout):
                outputs = [[output async for output in stream][-1] for stream in streams]
        finally:
            for stream in streams:
                await stream.aclose()
        return self._result(outputs)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        params = self._one(self._params(stop, kwargs))
        llm = self.engine
        with llm.stream(prompt, params) as stream, self.deadline(llm, [stream]):
            for output in stream:
                chunk = self._chunk(output)
                if chunk is not None:
                    if run_manager:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        params = self._one(self._params(stop, kwargs))
        llm = await self.aengine()
        stream = llm.submit(await asyncio.to_thread(llm.prepare, prompt, params))
        try:
            async with asyncio.timeout(self.timeout):
                async for output in stream:
                    chunk = self._chunk(output)
                    if chunk is not None:
                        if run_manager:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
        finally:
            await stream.aclose()

    @staticmethod
    def _one(params: SamplingParams) -> SamplingParams:
        if params.n > 1:
            raise ValidationError(f"n={params.n}: a stream has one answer; use generate", "n")
        return params

    def _chunk(self, output: RequestOutput) -> GenerationChunk | None:
        """What is new in a stream, or None for nothing."""
        answer = output.outputs[0]
        new = len(answer.new_token_ids)
        details: dict[str, Any] = {}
        if answer.logprobs is not None and new:
            details["logprobs"] = {"content": logprobs_content(answer, new)}
        if answer.finished:
            details |= {"finish_reason": answer.finish_reason, "model_name": self.model_id}
            details["token_usage"] = token_usage([output])
        if not answer.text_delta and not details:
            return None
        return GenerationChunk(text=answer.text_delta, generation_info=details or None)

    def _result(self, outputs: Sequence[RequestOutput]) -> LLMResult:
        generations = []
        for output in outputs:
            if output.error is not None:
                raise EngineError(str(output.error)) from output.error
            answers = []
            for answer in output.outputs:
                details: dict[str, Any] = {
                    "finish_reason": answer.finish_reason,
                    "stop_reason": answer.stop_reason,
                    "model_name": self.model_id,
                }
                if answer.logprobs is not None:
                    details["logprobs"] = {"content": logprobs_content(answer)}
                answers.append(Generation(text=answer.text, generation_info=details))
            generations.append(answers)
        usage = {"token_usage": token_usage(outputs), "model_name": self.model_id}
        return LLMResult(generations=generations, llm_output=usage)
