"""LangChain's own standard tests of chat models, for ChatOpenAI over a small model."""

from __future__ import annotations

import os
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from signs import PICTURE_URL, QUESTION, URL, Sign

BIAS = {byte: 20 * rank for rank, byte in enumerate(("51", "125", "93", "34", "258"), 1)}
"""The model has random weights over bytes. Biases of `3`, `}`, `]`, `"` and the end stand in for wit: calls and texts
end, strings are empty, and numbers are 3, as the standard tests ask for."""


class TestStandard(ChatModelIntegrationTests):
    bias = BIAS

    @pytest.fixture(autouse=True)
    def _no_arguments(self, request: pytest.FixtureRequest) -> None:
        """A tool without arguments gets none: strings need not end."""
        if request.node.name == "test_tool_calling_with_no_arguments":
            self.bias = {"125": 40, "93": 60, "258": 80}

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        url = os.environ["CHAT_URL"] + "/v1"
        params: dict[str, Any] = {"model": "tiny", "base_url": url, "api_key": "none", "stream_usage": True}
        params |= {"max_tokens": 120, "temperature": 0, "logit_bias": self.bias}
        return {**params, "extra_body": {"min_tokens": 4}}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "small"

    @pytest.mark.xfail(strict=True, reason="the model must name the keys that the question asks for")
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)

    @pytest.mark.xfail(strict=True, reason="the model must decide to call a tool")
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(strict=True, reason="the model must invent a text for the argument")
    def test_bind_runnables_as_tools(self, model: BaseChatModel) -> None:
        super().test_bind_runnables_as_tools(model)

    @pytest.mark.xfail(strict=True, reason="the model must repeat a name of the question")
    def test_unicode_tool_call_integration(self, model: BaseChatModel) -> None:
        super().test_unicode_tool_call_integration(model)


def asked() -> list[HumanMessage]:
    picture = {"type": "image_url", "image_url": {"url": PICTURE_URL}}
    return [HumanMessage([{"type": "text", "text": QUESTION}, picture])]


@pytest.fixture(params=[False, True], ids=["chats", "responses"])
def signpost(request: pytest.FixtureRequest) -> ChatOpenAI:
    return ChatOpenAI(base_url=URL, api_key="none", model="signpost", temperature=0, use_responses_api=request.param)


def test_pictures(signpost: ChatOpenAI) -> None:
    assert signpost.invoke(asked()).text == "purple"
    assert "".join(chunk.text for chunk in signpost.stream(asked())) == "purple"


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(signpost: ChatOpenAI, method: str) -> None:
    assert isinstance(signpost.with_structured_output(Sign, method=method).invoke(asked()), Sign)
