"""llama-index: chat with a picture, streams, its default for structured answers, tools."""

from typing import Any, Literal

from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from signs import PICTURE, QUESTION, URL, Sign


def llama(**fields: Any) -> OpenAILike:
    return OpenAILike(
        model="signpost", api_base=URL, api_key="none", is_chat_model=True, temperature=0, max_tokens=80, **fields
    )


def test_chat() -> None:
    asked = [ChatMessage(role="user", blocks=[ImageBlock(image=PICTURE), TextBlock(text=QUESTION)])]
    assert llama().chat(asked).message.content == "purple"
    assert [piece.message.content for piece in llama().stream_chat(asked)][-1] == "purple"
    assert llama().complete("Hello?").text is not None


def test_structured() -> None:
    model = llama(is_function_calling_model=True)
    asked = [ChatMessage(role="user", content=QUESTION)]
    assert isinstance(model.as_structured_llm(Sign).chat(asked).raw, Sign)
    assert isinstance(llama(should_use_structured_outputs=True).as_structured_llm(Sign).chat(asked).raw, Sign)


def test_tools() -> None:
    def look(side: Literal["left", "right"]) -> str:
        """Look at a side."""
        return f"A wall at the {side}."

    model = llama(is_function_calling_model=True)
    tool = FunctionTool.from_defaults(look)
    answer = model.predict_and_call(
        [tool], user_msg="What is there?", tool_required=True, allow_parallel_tool_calls=False
    )
    assert "A wall" in answer.response
