"""A decoder is lost in the middle: every sequence goes on where it stood, and none is told twice."""

from __future__ import annotations

import asyncio

import openai
import pytest

from common.messages import Encode, Generate, Resumed, Tokens
from tests.proxy.conftest import eventually
from tests.proxy.sample_media import image_part, picture
from tests.proxy.streams import gather

ANSWERS = ["a red sign stands here", "a blue one", "green"]


async def _lose(rig, request, after: int, answers=ANSWERS):
    """Begin a request, and kill its decoder once `after` messages have reached the proxy.

    Returns the request's answer, and the message that the other decoder got.
    """
    for decoder in rig.cluster.decoders:
        decoder.answer = lambda message: answers
        decoder.pause_after = after
    task = asyncio.create_task(request)
    await eventually(lambda: _num_accepted(rig) == after and any(d.of(Generate) for d in rig.cluster.decoders))
    victim, other = sorted(rig.cluster.decoders, key=lambda decoder: not decoder.of(Generate))
    other.pause_after = None
    await victim.die()
    answer = await task
    (again,) = other.of(Generate)
    assert again.request_id == victim.of(Generate)[0].request_id
    return answer, victim.of(Generate)[0], again


def _num_accepted(rig) -> int:
    runners = rig.service.dispatcher.runners.values()
    return sum(len(sequence.token_ids) for runner in runners for sequence in runner._progress._sequences)


async def _stream(rig, content="say", **fields):
    return await gather(await rig.chat(content, stream=True, **fields))


def _tokens(rig, index: int) -> list[int]:
    return rig.cluster.text.encode(ANSWERS[index], add_special_tokens=False)


async def test_each_sequence_goes_on_behind_its_own_tokens(serve):
    async with serve(decoders=2) as rig:
        (texts, ends), first, again = await _lose(rig, _stream(rig, n=3, seed=5), after=7)
        assert texts == dict(enumerate(ANSWERS))
        assert ends == dict.fromkeys(range(3), "stop")
        assert again.prompt_token_ids == first.prompt_token_ids
        assert again.sampling == first.sampling
        assert first.resumed == []
        have = {part.index: part.token_ids for part in again.resumed}
        assert sum(map(len, have.values())) <= 7
        assert all(tokens == _tokens(rig, index)[: len(tokens)] for index, tokens in have.items())


async def test_what_has_ended_is_not_generated_again(serve):
    async with serve(decoders=2) as rig:
        short = len(_tokens(rig, 2)) + 1
        (texts, _), _, again = await _lose(rig, _stream(rig, n=3), after=3 * short)
        assert texts == dict(enumerate(ANSWERS))
        assert [part.index for part in again.resumed] == [0, 1]


async def test_what_a_stop_string_has_ended_is_not_generated_again(serve):
    async with serve(decoders=2) as rig:
        whole = len(_tokens(rig, 1))
        (texts, _), _, again = await _lose(rig, _stream(rig, n=2, stop=" one"), after=2 * whole)
        assert texts == {0: ANSWERS[0], 1: "a blue"}
        assert again.resumed == [Resumed(0, _tokens(rig, 0)[:whole])]


async def test_a_request_that_has_got_nothing_yet_is_simply_sent_again(serve):
    async with serve(decoders=2) as rig:
        (texts, _), _, again = await _lose(rig, _stream(rig, n=2), after=0)
        assert texts == {0: ANSWERS[0], 1: ANSWERS[1]}
        assert again.resumed == []


async def test_beams_start_over(serve):
    async with serve(decoders=2) as rig:
        beams = rig.chat(n=2, extra_body={"use_beam_search": True, "best_of": 3})
        answer, first, again = await _lose(rig, beams, after=0)
        assert [choice.message.content for choice in answer.choices] == ANSWERS[:2]
        assert again.resumed == []
        assert again.sampling == first.sampling


async def test_an_answer_whose_last_token_had_come_needs_no_other_decoder(serve):
    async with serve(decoders=1) as rig:
        decoder = rig.cluster.decoders[0]
        ids = _tokens(rig, 0)[:2]
        decoder.messages = lambda message: [
            Tokens(message.request_id, place, [token]) for place, token in enumerate([*ids, 0])
        ]
        decoder.pause_after = 2
        task = asyncio.create_task(_stream(rig, max_tokens=2))
        await eventually(lambda: _num_accepted(rig) == 2)
        await decoder.die()
        assert (await task)[1] == {0: "length"}


async def test_pictures_and_log_probabilities_move_along(serve):
    async with serve(decoders=2) as rig:
        content = [image_part(picture()), {"type": "text", "text": "say"}]
        request = rig.chat(content, logprobs=True, n=1, extra_body={"prompt_logprobs": 0, "return_token_ids": True})
        answer, _, again = await _lose(rig, request, after=2)
        (choice,) = answer.choices
        assert choice.message.content == ANSWERS[0]
        assert len(choice.logprobs.content) == len(choice.token_ids) == len(_tokens(rig, 0)) + 1
        logprobs = [round(entry.logprob, 6) for entry in choice.logprobs.content]
        assert logprobs == [-(place + 1) / 10 for place in range(len(logprobs))]
        assert len(answer.prompt_logprobs) == len(again.prompt_token_ids)
        assert {message.destination for message in rig.cluster.encoders[0].of(Encode)} == {"pd0", "pd1"}


async def test_two_losses_in_a_row_repeat_nothing(serve):
    async with serve(decoders=3) as rig:
        for decoder, after in zip(rig.cluster.decoders, (2, 2, None), strict=True):
            decoder.answer, decoder.pause_after = (lambda message: ANSWERS), after
        task = asyncio.create_task(_stream(rig, n=2))
        for count in (2, 4):
            await eventually(lambda count=count: _num_accepted(rig) == count)
            at = [d for d in rig.cluster.decoders if d.alive and d.of(Generate)]
            if at[0].pause_after is None:
                break
            await at[0].die()
        assert (await task)[0] == {0: ANSWERS[0], 1: ANSWERS[1]}


async def test_a_request_that_no_decoder_survives_is_given_up(serve):
    """Each of five decoders dies of it: the fifth is never asked, and the client is told."""
    async with serve(decoders=5) as rig:
        for decoder in rig.cluster.decoders:
            decoder.answer, decoder.pause_after = (lambda message: ANSWERS), 0
        task = asyncio.create_task(rig.chat("say", n=2))
        for _ in range(4):
            await eventually(lambda: any(d.alive and d.of(Generate) for d in rig.cluster.decoders))
            await next(d for d in rig.cluster.decoders if d.alive and d.of(Generate)).die()
        with pytest.raises(openai.APIStatusError) as caught:
            await task
        assert caught.value.status_code == 503
        assert "4 decoders were lost" in caught.value.message
        assert sum(bool(d.of(Generate)) for d in rig.cluster.decoders) == 4
