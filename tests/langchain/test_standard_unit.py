"""LangChain's own suite for chat models, the part that needs no answers."""

from __future__ import annotations

import pytest
from langchain_tests.unit_tests import ChatModelUnitTests

from pagedllm import ChatPagedLLM


class TestChatPagedLLM(ChatModelUnitTests):
    @property
    def chat_model_class(self):
        return ChatPagedLLM

    @property
    def chat_model_params(self):
        return {"model_id": "smollm2"}

    @property
    def init_from_env_params(self):
        return {"HF_TOKEN": "a token"}, {}, {"token": "a token"}

    @property
    def supports_json_mode(self):
        return True

    @property
    def supports_model_override(self):
        return False

    @pytest.mark.xfail(
        reason="LangChain's allowed_objects='all' names its own partners' classes alone; "
        "test_chat_model.py loads with the class in the list"
    )
    def test_serdes(self, model, snapshot):
        super().test_serdes(model, snapshot)
