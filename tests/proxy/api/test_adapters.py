"""LoRA adapters by the name of the model: what workers are told, what clients read."""

from __future__ import annotations

import openai
import pytest

from common.errors import ErrorInfo
from common.messages import Generate
from tests.tiny.lora import write_adapter

NAMES = ("whisper-7b:large", "poet")


@pytest.fixture
async def rig(serve, text_model, tmp_path):
    modules = [f"{name}={write_adapter(tmp_path / name, {})}" for name in ("verse", "prose")]
    async with serve(text_model.folder, encoders=0, lora_modules=modules, served_model_name=NAMES) as harness:
        yield harness


def told(rig):
    return rig.cluster.decoders[0].of(Generate)[-1].sampling.adapter


async def test_models_are_listed_under_each_name_with_their_parent(rig):
    listed = {one.id: one.model_extra.get("parent") async for one in rig.client.models.list()}
    adapted = {f"{name}:{adapter}": name for name in NAMES for adapter in ("verse", "prose")}
    assert listed == {**dict.fromkeys(NAMES), **adapted}
    assert (await rig.client.models.retrieve("poet:prose")).model_extra["parent"] == "poet"


async def test_the_name_of_the_model_chooses_the_adapter_and_comes_back(rig):
    for model, adapter, named in (
        ("poet:verse", "verse", "poet:verse"),
        ("whisper-7b:large:prose", "prose", "whisper-7b:large:prose"),
        ("poet", "", "poet"),
        (NAMES[0], "", NAMES[0]),
    ):
        chat = await rig.chat(model=model)
        assert (told(rig), chat.model) == (adapter, named)
        completion = await rig.client.completions.create(model=model, prompt=["a", "b"], max_tokens=3)
        assert (told(rig), completion.model) == (adapter, named)
        response = await rig.client.responses.create(model=model, input="Which?")
        assert (told(rig), response.model) == (adapter, named)
        chunks = [chunk async for chunk in await rig.chat(model=model, stream=True)]
        assert {chunk.model for chunk in chunks} == {named}


async def test_an_unknown_adapter_is_an_unknown_model(rig):
    for call in (
        rig.chat(model="poet:none"),
        rig.client.completions.create(model="verse", prompt="a"),
        rig.client.responses.create(model=":verse", input="a"),
        rig.client.models.retrieve("poet:"),
    ):
        with pytest.raises(openai.NotFoundError, match=r"does not exist here; .*'poet:verse', 'poet:prose'") as caught:
            await call
        assert caught.value.body["param"] == "model"
    assert rig.cluster.decoders[0].of(Generate) == []


async def test_a_workers_word_about_the_adapter_names_the_model(rig):
    gone = ErrorInfo("model_not_found", "the adapter 'verse' cannot be loaded", "adapter")
    rig.cluster.decoders[0].failure = gone
    with pytest.raises(openai.NotFoundError, match="cannot be loaded") as caught:
        await rig.chat(model="poet:verse")
    assert caught.value.body["param"] == "model"
    await rig.assert_clean()
