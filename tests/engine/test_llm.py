"""LLM: one request that fails takes nothing from the others."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs
from tokenizers import Tokenizer, decoders

from common.errors import TriptychError
from common.sampling_params import SamplingParams
from engine.llm import LLM, _media_bytes
from engine.media.audio import decode_audio
from tests import tiny_models
from tests.media_files import encoded, noise, tone
from tests.tiny.text import make_qwen3

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("vision")
    tiny_models.make_qwen2_5_vl(path)
    hidden = 4 * int(LLM(path).info.text_config["hidden_size"])
    return LLM(path, encoder_cache_bytes=hidden * 20)


def with_picture(llm: LLM, size: tuple[int, int]) -> dict[str, object]:
    token_ids = [5, llm.info.placeholder_token_id or 0, 6]
    return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": encoded(noise(*size))}}


def run(llm: LLM, request_ids: list[str]) -> tuple[dict[str, list[int]], list[str]]:
    tokens: dict[str, list[int]] = {}
    errors = []
    while len(tokens) + len(errors) < len(request_ids):
        try:
            tokens |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
        except TriptychError as error:
            errors.append(error.info.code)
    return tokens, errors


def test_a_reset_forgets_the_keys_of_earlier_prompts_once_nothing_runs(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(5, 45))}

    def num_cached() -> int:
        return llm.generate(prompt, GREEDY)[0].num_cached_tokens

    before = num_cached()
    assert num_cached() >= 16 > before
    llm.reset_prefix_cache()
    assert llm.decoder.blocks.num_cached == 0
    assert num_cached() == 0
    request_id = llm.add(prompt, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(TriptychError, match=r"^requests run \(1\): the cache holds what they read$"):
        llm.reset_prefix_cache()
    llm.abort(request_id)


def test_two_models_in_one_process_prepare_media_each_in_its_own_way(llm: LLM) -> None:
    before, other = llm.generate(with_picture(llm, (56, 56)), GREEDY)[0].outputs[0].token_ids, LLM("signpost")
    other.generate(with_picture(other, (56, 56)), GREEDY)
    assert llm.generate(with_picture(llm, (56, 56)), GREEDY)[0].outputs[0].token_ids == before


def test_an_unknown_option_is_refused_with_the_closest_name() -> None:
    with pytest.raises(TriptychError, match=r"^unknown setting 'kv_cache_bytez'; did you mean 'kv_cache_bytes'\?$"):
        LLM("signpost", kv_cache_bytez=3)


def test_a_part_of_another_type_is_refused_not_left_out() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "file:///sign.png"}}, {"type": "text", "text": "What is it?"}]
    with pytest.raises(TriptychError, match="text, image, audio and video, not image_url"):
        LLM("signpost").chat([{"role": "user", "content": parts}], GREEDY)


def test_parts_are_one_text_for_a_model_of_text_as_over_http_and_content_may_be_missing(tmp_path: Path) -> None:
    folder = make_qwen3(tmp_path / "model")
    llm = LLM(folder, chat_template="{% for m in messages %}[{{ m.content }}]{% endfor %}")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    asked = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}, {"role": "assistant"}]
    [output] = llm.chat(asked, GREEDY, return_prompts=True)
    assert output.prompt == "[one\ntwo][][]"


def test_prompts_without_parameters_are_sampled_as_generation_config_says(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(LLM("signpost").info.folder, tmp_path / "model"))
    greedy = SamplingParams(temperature=0.0, max_tokens=256)
    assert LLM(folder).get_default_sampling_params() == greedy
    (folder / "generation_config.json").write_text('{"eos_token_id": 393, "temperature": 0.6, "top_k": 20}')
    assert LLM(folder, generation_config="none").get_default_sampling_params() == greedy
    llm = LLM(folder, chat_template="{{ messages[0].content }}{{ more }}")
    sampled = SamplingParams(temperature=0.6, top_k=20, max_tokens=256)
    assert llm.get_default_sampling_params() == sampled
    conversation = [{"role": "user", "content": "red"}]
    [output] = llm.chat(conversation, GREEDY, return_prompts=True, chat_template_kwargs={"more": " sign"})
    assert output.prompt == "red sign"


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"exponential_decay_length_penalty": [5, 1.01], "encoder_repetition_penalty": 1.2, "typical_p": 0.9}, 3),
        ({"exponential_decay_length_penalty": None, "encoder_repetition_penalty": 1.0, "epsilon_cutoff": 0.0}, 0),
    ],
    ids=["set", "neutral"],
)
def test_rules_of_a_checkpoint_that_are_not_computed_are_told_once(
    tmp_path: Path, rules: dict[str, object], told: int
) -> None:
    folder = make_qwen3(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **rules}))
    with capture_logs() as logs:
        LLM(folder).generate([[5, 6], [6, 5]], GREEDY)
    found = [one["rules"] for one in logs if one["event"] == "rules of generation_config.json are not computed"]
    assert found == ([list(rules)] if told else [])


def test_a_completion_begins_with_the_blank_behind_the_prompt_and_a_chat_with_a_word(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(LLM("signpost").info.folder, tmp_path / "model"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    [sign] = tokenizer.encode(" sign", add_special_tokens=False).ids
    llm = LLM(folder, chat_template="{{ messages[-1].content }}")
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, allowed_token_ids=(sign,))
    [completed] = llm.generate("red", params)
    [answered] = llm.chat([{"role": "user", "content": "red"}], params)
    [continued] = llm.chat([{"role": "assistant", "content": "red"}], params, continue_final_message=True)
    texts = [output.outputs[0].text for output in (completed, answered, continued)]
    assert texts == [" sign sign", "sign sign", " sign sign"]


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("text_config", {"hidden_size": "abc"}, "hidden_size is 'abc', not a positive whole number"),
        ("text_config", {"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "."),
        ("vision_config", {"depth": "two"}, "depth"),
    ],
)
def test_a_broken_configuration_is_a_sentence_that_names_the_file(
    llm: LLM, tmp_path: Path, part: str, change: dict[str, object], said: str
) -> None:
    folder = Path(shutil.copytree(llm.info.folder, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, part: {**config[part], **change}}))
    with pytest.raises(TriptychError, match=f"{folder}/config.json: .*{said}") as caught:
        LLM(folder)
    assert (caught.value.info.code, caught.value.info.message.count("\n")) == ("model_not_found", 0)


def test_a_request_that_fails_leaves_its_neighbours_whole(llm: LLM) -> None:
    small, text = with_picture(llm, (56, 56)), {"prompt_token_ids": [5, 6, 7]}
    expected = [output.outputs[0].token_ids for output in llm.generate([small, text], GREEDY)]  # type: ignore[list-item]
    large = with_picture(llm, (196, 196))
    ids = [llm.add(prompt, GREEDY) for prompt in (small, large, text)]  # type: ignore[arg-type]
    tokens, errors = run(llm, ids)
    assert errors == ["item_too_large"]
    assert [tokens[ids[0]], tokens[ids[2]]] == expected
    assert llm.decoder.is_empty()
    assert llm.encoder is not None
    assert not llm.encoder.has_work()


def test_requests_that_fail_in_one_step_are_all_told(llm: LLM) -> None:
    too_long = {"prompt_token_ids": [5] * llm.decoder.runner.max_model_len}
    ids = [llm.add(prompt, GREEDY) for prompt in (too_long, {"prompt_token_ids": [5, 6, 7]}, too_long)]  # type: ignore[arg-type]
    told = []
    for _ in range(20):
        try:
            told += [output.request_id for output in llm.step()]
        except TriptychError as error:
            told.append(error.info.code)
    assert told == ["context_length_exceeded", "context_length_exceeded", ids[1]]


def test_a_batch_takes_neither_answers_nor_errors_of_requests_queued_before(llm: LLM) -> None:
    too_long = {"prompt_token_ids": [5] * llm.decoder.runner.max_model_len}
    ids = [llm.add(prompt, GREEDY) for prompt in (too_long, {"prompt_token_ids": [5, 6, 7]})]  # type: ignore[arg-type]
    [output] = llm.generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)  # type: ignore[typeddict-item]
    with pytest.raises(TriptychError, match="the context length is"):
        llm.generate([{"prompt_token_ids": [7, 6]}, too_long, too_long], GREEDY)  # type: ignore[list-item]
    with pytest.raises(TriptychError, match="the context length is"):
        llm.step()
    assert [(one.request_id, one.outputs) for one in llm.step()] == [(ids[1], output.outputs)]
    assert llm.step() == []


def test_a_batch_with_a_bad_prompt_leaves_nothing_behind(llm: LLM) -> None:
    broken = {"prompt_token_ids": [5, 6], "multi_modal_data": {"image": encoded(noise(56, 56))}}
    with pytest.raises(TriptychError, match="0 media placeholders for 1"):
        llm.generate([{"prompt_token_ids": [5, 6, 7]}, broken], GREEDY)  # type: ignore[list-item]
    assert llm.decoder.is_empty()


def test_a_damaged_picture_leaves_nothing_behind(llm: LLM) -> None:
    damaged = {**with_picture(llm, (56, 56)), "multi_modal_data": {"image": b"no picture"}}
    with pytest.raises(TriptychError, match="not in one of the formats"):
        llm.generate([with_picture(llm, (56, 56)), damaged], GREEDY)  # type: ignore[list-item]
    assert llm.decoder.is_empty()


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr"])
def test_a_picture_of_pil_may_have_a_mode_that_png_lacks(llm: LLM, mode: str) -> None:
    picture = noise(56, 56).convert(mode)
    forms = (picture, encoded(picture, "TIFF"))
    prompts = [{**with_picture(llm, (56, 56)), "multi_modal_data": {"image": form}} for form in forms]
    of_pil, of_file = llm.generate(prompts, GREEDY)  # type: ignore[arg-type]
    assert of_pil.outputs == of_file.outputs


@pytest.mark.parametrize("dtype", ["int16", "int32"])
def test_samples_in_whole_numbers_are_as_loud_as_in_a_file(dtype: str) -> None:
    samples = (tone(0.1) * np.iinfo(dtype).max).astype(dtype)
    heard = decode_audio(_media_bytes((samples, 16000)), 16000, 1.0)
    assert np.abs(heard - tone(0.1)[:, 0]).max() < 2**-14


def test_samples_in_half_precision_are_heard() -> None:
    samples = tone(0.1).astype(np.float16)
    assert np.array_equal(decode_audio(_media_bytes((samples, 16000)), 16000, 1.0), samples[:, 0])


@pytest.mark.parametrize(
    "item",
    [
        "no/such.png",
        np.zeros((56, 56, 3), np.uint8),
        None,
        (np.zeros(100, np.int64), 16000),
        (np.zeros((1, 16000), np.float32), 16000),  # channels first
        (16000, np.zeros(100, np.float32)),
    ],
    ids=["path", "array", "nothing", "whole numbers of 64 bits", "16000 channels", "rate first"],
)
def test_a_media_item_that_cannot_be_read_is_told_with_what_can(llm: LLM, item: object) -> None:
    prompt = {**with_picture(llm, (56, 56)), "multi_modal_data": {"image": [item]}}
    with pytest.raises(
        TriptychError, match=r"a media item is bytes, a path, a PIL image, or \(samples, sampling rate\)"
    ):
        llm.generate([prompt], GREEDY)  # type: ignore[list-item]
    assert llm.decoder.is_empty()


@pytest.mark.parametrize(
    "video",
    [
        None,
        noise(56, 56),
        ["one.png"],
        np.zeros((4, 56, 56, 3), np.float32),
        np.zeros((4, 3, 56, 56), np.uint8),
        (*[noise(56, 56)] * 4,),
        ([noise(56, 56)] * 4, "fast"),
    ],
    ids=["nothing", "picture", "paths", "floats", "channels first", "tuple", "no rate"],
)
def test_a_video_that_cannot_be_read_is_told_with_what_can(llm: LLM, video: object) -> None:
    prompt = {"prompt_token_ids": [5, llm.info.placeholder_of("video"), 6], "multi_modal_data": {"video": [video]}}
    with pytest.raises(
        TriptychError, match=r"^a video is bytes, a path, frames .*; this .* cannot be read: ."
    ) as caught:
        llm.generate([prompt], GREEDY)  # type: ignore[list-item]
    assert caught.value.info.code == "bad_media"
    assert llm.decoder.is_empty()


@pytest.mark.parametrize("rate", [0.0, float("nan"), float("inf")])
def test_a_video_without_a_rate_is_refused(llm: LLM, rate: float) -> None:
    content = [{"type": "video", "video": ([noise(56, 56)] * 4, rate)}]
    with pytest.raises(TriptychError, match="one size and a rate"):
        llm.chat([{"role": "user", "content": content}], GREEDY)


def test_pictures_are_counted_where_they_are_computed(llm: LLM) -> None:
    before = llm.decoder.stats()["encoder_computations"]
    llm.generate([with_picture(llm, (84, 56))], GREEDY)  # type: ignore[list-item]
    assert llm.decoder.stats()["encoder_computations"] == before + 1


def test_bad_words_never_appear_and_stop_strings_wait_for_the_least_length(llm: LLM) -> None:
    prompt = {"prompt_token_ids": [5, 6, 7]}
    letters = [ord(letter) for letter in "abcdefgh"]

    def text(**more: object) -> str:
        params = SamplingParams(
            **{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "allowed_token_ids": letters, **more}  # type: ignore[arg-type]
        )
        return llm.generate(prompt, params)[0].outputs[0].text  # type: ignore[arg-type]

    free = text()
    assert len(free) == 12
    assert free[3] not in text(bad_words=(free[3],))
    assert text(stop=(free[0],)) == ""
    assert text(stop_token_ids=(ord(free[0]),)) == "", "the token that ends a text is no part of it, as over HTTP"
    later = text(stop=(free[0],), min_tokens=6)
    assert later == free or len(later) >= 6


def test_a_batch_may_be_larger_than_a_server_would_let_wait(llm: LLM) -> None:
    before = llm.decoder.stats()["requests_failed_total"]
    ids = [llm.add({"prompt_token_ids": [5, 6, 7]}, GREEDY) for _ in range(5000)]
    llm.step()
    assert llm.decoder.stats()["requests_failed_total"] == before
    for request_id in ids:
        llm.abort(request_id)
    assert llm.decoder.is_empty()


def test_a_generated_prefix_is_no_part_of_the_answer(llm: LLM) -> None:
    """Such as the language that Whisper detects: an answer is the same where the prompt tells it."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1, prefix_allowed=((8,), (9,)))
    told, detected = llm.generate(
        [{"prompt_token_ids": [5, 6, 8, 9]}, {"prompt_token_ids": [5, 6]}],
        [replace(params, max_tokens=4, prefix_allowed=()), params],
    )
    [expected], [found] = told.outputs, detected.outputs
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
    assert found.prefix_token_ids == [8, 9]
    assert [one.token_id for one in found.logprobs] == found.token_ids


def test_beams_end_at_a_stop_string_with_their_tokens_as_with_their_text(llm: LLM) -> None:
    letters = tuple(ord(letter) for letter in "abcdefgh")
    params = SamplingParams(beam_width=2, max_tokens=8, ignore_eos=True, allowed_token_ids=letters)
    whole = llm.generate({"prompt_token_ids": [5, 6, 7]}, params)[0].outputs[0]
    cut = llm.generate({"prompt_token_ids": [5, 6, 7]}, replace(params, stop=(whole.text[3],)))[0].outputs[0]
    end = whole.text.index(whole.text[3])
    assert (cut.text, cut.token_ids, cut.finish_reason) == (whole.text[:end], whole.token_ids[: end + 1], "stop")


def test_parameters_of_a_wrong_type_leave_nothing_behind(llm: LLM) -> None:
    with pytest.raises(TypeError):
        llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=None))  # type: ignore[arg-type]
    llm.reset_prefix_cache()


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_parameters_as_prompts_are_needed(llm: LLM, count: int) -> None:
    with pytest.raises(TriptychError, match=f"^2 prompts with {count} sampling parameters$"):
        llm.generate([[5, 6, 7], [6, 7, 5]], [GREEDY] * count)
    assert llm.decoder.is_empty()


def test_a_model_without_a_decoder_of_speech_transcribes_nothing(llm: LLM) -> None:
    with pytest.raises(TriptychError, match="is no speech model: give clips to"):
        llm.transcribe((tone(0.1)[:, 0], 16000))


def test_a_part_without_its_media_is_refused(llm: LLM) -> None:
    with pytest.raises(TriptychError, match=r"a media item is bytes, .*; this NoneType cannot be read"):
        llm.chat([{"role": "user", "content": [{"type": "image", "url": "sign.png"}]}], GREEDY)


@pytest.mark.parametrize("media", [[noise(56, 56)], noise(56, 56), "sign.png"], ids=["list", "picture", "path"])
def test_media_that_do_not_stand_by_kind_are_refused(llm: LLM, media: object) -> None:
    prompt = {**with_picture(llm, (56, 56)), "multi_modal_data": media}
    with pytest.raises(TriptychError, match="media by kind as `multi_modal_data`"):
        llm.generate([prompt], GREEDY)  # type: ignore[list-item]
