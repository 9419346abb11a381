"""One worker prefills, another one decodes: who is sent what, and what happens when either fails."""

from __future__ import annotations

import asyncio

import msgspec
import openai
import pytest

from common.errors import ErrorInfo
from common.messages import Abort, Encode, Generate, Prefilled
from proxy.dispatch.progress import MAX_WAITS
from tests.proxy.conftest import eventually
from tests.proxy.fake_decoders import FakePrefill
from tests.proxy.fake_workers import SILENT
from tests.proxy.sample_media import image_part, picture
from tests.proxy.streams import gather

PICTURE = [image_part(picture()), {"type": "text", "text": "say"}]


def _by_use(workers):
    """The worker that was asked first, then the others."""
    return sorted(workers, key=lambda worker: not worker.of(Generate))


async def _asked(workers):
    await eventually(lambda: any(worker.of(Generate) for worker in workers))
    return _by_use(workers)


@pytest.fixture
async def pair(serve):
    """A proxy with a prefill and a decode worker."""
    async with serve(decoders=0, pairs=(1, 1)) as rig:
        yield rig


@pytest.fixture
async def trio(serve):
    """A proxy with two prefill workers and a decode worker."""
    async with serve(decoders=0, pairs=(2, 1)) as rig:
        yield rig


async def test_one_computes_the_prompt_and_another_one_the_tokens(pair):
    answer = await pair.chat(PICTURE)
    assert answer.choices[0].message.content == "a red sign"
    (prefill,), (decode,) = pair.cluster.prefills[0].of(Generate), pair.cluster.decoders[0].of(Generate)
    assert (prefill.prefill_for, prefill.prefilled) == ("d0", False)
    assert (decode.prefill_for, decode.prefilled) == ("", True)
    assert prefill.attempt == decode.attempt
    assert prefill.prompt_token_ids == decode.prompt_token_ids
    assert [message.destination for message in pair.cluster.encoders[0].of(Encode)] == ["p0"]

    async def timeline_is_whole() -> bool:
        """Three workers tell their spans, by three connections."""
        timeline = (await pair.http.get(f"/v1/requests/{answer.id}/timeline")).json()
        return {"encode", "prefill", "decode"} <= {span["stage"] for span in timeline["spans"]}

    await eventually(timeline_is_whole)
    assert pair.aborted() == set()


async def test_a_failing_prefill_is_repeated_elsewhere_for_the_same_decoder(trio):
    for prefill in trio.cluster.prefills:
        prefill.script = lambda message: ErrorInfo("internal_error", "boom") if message.attempt == 1 else None
    assert (await trio.chat(PICTURE)).choices[0].message.content == "a red sign"
    assert [len(prefill.of(Generate)) for prefill in trio.cluster.prefills] == [1, 1]
    assert len(trio.cluster.decoders[0].of(Generate)) == 1
    assert trio.count("retries_total", reason="prefill_error") == 1


async def test_an_encoder_that_is_lost_before_it_says_that_it_is_done_costs_nothing_once_the_prompt_is_computed(serve):
    """Its item has been read: who is offered it again has forgotten the request, and takes no offer for it."""
    async with serve(encoders=2, decoders=0, pairs=(1, 1)) as rig:
        encoders, decoder = rig.cluster.encoders, rig.cluster.decoders[0]

        def deliver_silently(message: Encode) -> str:
            rig.cluster.prefills[0].put_input(message.request_id, message.input_id)
            return SILENT

        for encoder in encoders:
            encoder.script = deliver_silently
        decoder.pause_after = 1
        task = asyncio.create_task(rig.chat(PICTURE))
        await eventually(lambda: any(encoder.of(Encode) for encoder in encoders))
        victim, other = encoders if encoders[0].of(Encode) else encoders[::-1]
        (prefill,) = rig.service.pool.workers("prefill")
        await eventually(lambda: bool(decoder.of(Generate)) and prefill.load.requests == 0)
        await victim.die()
        await eventually(lambda: [worker.instance_id for worker in rig.service.pool.workers("encoder")] == [other.id])
        decoder.resume.set()
        assert (await task).choices[0].message.content == "a red sign"
        assert other.of(Encode) == []


async def test_three_failed_prefills_are_the_last_word(pair):
    pair.cluster.prefills[0].script = lambda message: ErrorInfo("internal_error", f"boom {message.attempt}")
    with pytest.raises(openai.InternalServerError, match=r"3 attempts.*boom 3"):
        await pair.chat()
    await eventually(lambda: pair.aborted() == {"d0"})
    await eventually(lambda: not pair.cluster.decoders[0]._running)


async def test_a_busy_decoder_is_waited_for_longer_than_a_failing_prefill(pair):
    prefill = pair.cluster.prefills[0]
    prefill.script = lambda message: ErrorInfo("timeout", "no room yet") if message.attempt < 9 else None
    assert (await pair.chat()).choices[0].message.content == "a red sign"


async def test_keys_and_values_that_are_only_slow_are_waited_for_for_as_long_as_the_request_lasts(serve, monkeypatch):
    """Each time for as long as a step of a handoff may take, and so more often than what ends at once is tried."""
    at_once, timeout_s = FakePrefill.run, 0.1

    async def run(prefill, proxy, message):
        if message.attempt > MAX_WAITS + 2:
            await at_once(prefill, proxy, message)
        else:
            await asyncio.sleep(0.75 * timeout_s)
            late = ErrorInfo("timeout", "the keys and values were not in place in time")
            await prefill.reply(proxy, Prefilled(message.request_id, message.attempt, late))

    monkeypatch.setattr(FakePrefill, "run", run)
    async with serve(decoders=0, pairs=(1, 1), handoff_timeout_s=timeout_s) as rig:
        assert (await rig.chat()).choices[0].message.content == "a red sign"


async def test_keys_and_values_that_are_late_at_once_again_and_again_are_given_up(pair):
    pair.cluster.prefills[0].script = lambda message: ErrorInfo("timeout", "no room yet")
    with pytest.raises(openai.APIStatusError, match=f"{MAX_WAITS} attempts") as caught:
        await pair.chat()
    assert caught.value.status_code == 504


async def test_what_one_prefill_worker_cannot_deliver_another_one_does(trio):
    """One has the prompt cached, and would be asked first again."""
    for prefill in trio.cluster.prefills:
        prefill.script = lambda message: SILENT
    task = asyncio.create_task(trio.chat())
    cut_off, other = await _asked(trio.cluster.prefills)
    other.script = lambda message: None
    (generate,) = cut_off.of(Generate)
    await eventually(lambda: generate.request_id in cut_off._running)
    cut_off._cancel(generate.request_id)
    late = ErrorInfo("timeout", "the keys and values were not in place in time")
    await cut_off.reply(cut_off.proxies[0], Prefilled(generate.request_id, generate.attempt, late))
    assert (await task).choices[0].message.content == "a red sign"
    assert (len(cut_off.of(Generate)), len(other.of(Generate))) == (1, 1)


async def test_what_can_never_fit_is_the_clients_error_at_once(trio):
    for prefill in trio.cluster.prefills:
        prefill.script = lambda message: ErrorInfo("item_too_large", "9 blocks are wanted, there are 8")
    with pytest.raises(openai.APIStatusError, match="there are 8") as caught:
        await trio.chat()
    assert caught.value.status_code == 413
    assert sum(len(prefill.of(Generate)) for prefill in trio.cluster.prefills) == 1
    await eventually(lambda: not trio.cluster.decoders[0]._running)


async def test_a_lost_prefill_worker_is_replaced_and_gets_the_pictures_too(trio):
    for prefill in trio.cluster.prefills:
        prefill.script = lambda message: SILENT
    task = asyncio.create_task(trio.chat(PICTURE))
    victim, other = await _asked(trio.cluster.prefills)
    other.script = lambda message: None
    await victim.die()
    assert (await task).choices[0].message.content == "a red sign"
    (again,) = other.of(Generate)
    assert again.attempt > victim.of(Generate)[0].attempt
    assert len(trio.cluster.decoders[0].of(Generate)) == 1
    assert [message.destination for message in trio.cluster.encoders[0].of(Encode)] == [victim.id, other.id]
    assert trio.count("retries_total", reason="prefill_gone") == 1


async def test_the_only_prefill_worker_is_waited_for(pair):
    victim = pair.cluster.prefills[0]
    victim.script = lambda message: SILENT
    task = asyncio.create_task(pair.chat())
    await _asked([victim])
    await victim.die()
    await eventually(lambda: pair.count("retries_total", reason="prefill_gone") == 1)
    await pair.cluster.add_prefill()
    assert (await task).choices[0].message.content == "a red sign"


async def test_without_a_prefill_worker_a_whole_one_takes_over(pair):
    victim = pair.cluster.prefills[0]
    victim.script = lambda message: SILENT
    task = asyncio.create_task(pair.chat())
    await _asked([victim])
    whole = await pair.cluster.add_decoder("pd")
    await pair.wait_for_workers()
    await victim.die()
    assert (await task).choices[0].message.content == "a red sign"
    assert not whole.of(Generate)[0].prefilled
    await eventually(lambda: pair.aborted() == {"d0"})


async def test_a_prefill_worker_that_is_lost_after_its_work_is_not_missed(trio):
    decoder = trio.cluster.decoders[0]
    decoder.pause_after = 2
    for prefill in trio.cluster.prefills:
        prefill.hold = True
    task = asyncio.create_task(gather(await trio.chat(stream=True)))
    victim, other = await _asked(trio.cluster.prefills)
    await eventually(lambda: any(runner._begun for runner in trio.service.dispatcher.runners.values()))
    await victim.die()
    await trio.wait_for_workers()
    decoder.resume.set()
    assert (await task)[0] == {0: "a red sign"}
    assert not other.of(Generate)


async def test_a_lost_decoder_is_replaced_behind_its_tokens_with_a_new_prefill(serve):
    async with serve(decoders=0, pairs=(1, 2)) as rig:
        for decoder in rig.cluster.decoders:
            decoder.pause_after = 2
        stream = await rig.chat(PICTURE, stream=True)
        victim, other = await _asked(rig.cluster.decoders)
        other.pause_after = None
        runner = next(iter(rig.service.dispatcher.runners.values()))
        await eventually(lambda: len(runner._progress._sequences[0].token_ids) == 2)
        await victim.die()
        assert (await gather(stream))[0] == {0: "a red sign"}
        (again,) = other.of(Generate)
        assert [len(part.token_ids) for part in again.resumed] == [2]
        first, second = rig.cluster.prefills[0].of(Generate)
        assert second.attempt == again.attempt > first.attempt
        assert second.prefill_for == other.id
        assert second.resumed == again.resumed


async def test_a_prefill_for_a_lost_decoder_is_aborted(serve):
    async with serve(decoders=0, pairs=(1, 2)) as rig:
        prefill = rig.cluster.prefills[0]
        prefill.script = lambda message: SILENT if message.attempt == 1 else None
        task = asyncio.create_task(rig.chat())
        victim, _ = await _asked(rig.cluster.decoders)
        await _asked([prefill])
        await victim.die()
        assert (await task).choices[0].message.content == "a red sign"
        kinds = [type(message) for message in prefill.received]
        assert kinds == [Generate, Abort, Generate]


async def test_a_decoder_that_lost_the_prompt_gets_it_again(pair):
    pair.cluster.decoders[0].ask_prompt_again = 2
    assert (await pair.chat()).choices[0].message.content == "a red sign"
    assert [message.attempt for message in pair.cluster.prefills[0].of(Generate)] == [1, 2, 3]
    assert pair.count("retries_total", reason="prompt_needed") == 2


async def test_a_slow_prefill_is_aborted_when_the_decoder_waits_no_more(trio):
    decoder = trio.cluster.decoders[0]
    for prefill in trio.cluster.prefills:
        prefill.script = lambda message: SILENT if message.attempt == 1 else None
    task = asyncio.create_task(trio.chat())
    (slow, _) = await _asked(trio.cluster.prefills)
    (message,) = decoder.of(Generate)
    await eventually(lambda: message.request_id in decoder._running)
    await decoder.ask_for_prompt(decoder.proxies[0], message.request_id)
    assert (await task).choices[0].message.content == "a red sign"
    await eventually(lambda: bool(slow.of(Abort)))


async def test_a_decoder_that_computes_again_gets_the_picture_itself(pair):
    decoder = pair.cluster.decoders[0]
    decoder.pause_after = 1
    task = asyncio.create_task(pair.chat(PICTURE))
    await eventually(lambda: any(runner._begun for runner in pair.service.dispatcher.runners.values()))
    (message,) = decoder.of(Generate)
    await decoder.ask_for_input(decoder.proxies[0], message.request_id, 0)
    await decoder.wait_for(message.request_id, {0})
    decoder.resume.set()
    assert (await task).choices[0].message.content == "a red sign"
    assert [one.destination for one in pair.cluster.encoders[0].of(Encode)] == ["p0", "d0"]


async def test_log_probabilities_of_the_prompt_come_before_the_tokens(pair):
    prefill = pair.cluster.prefills[0]
    prefill.hold = True
    task = asyncio.create_task(pair.chat(extra_body={"prompt_logprobs": 0}))
    await eventually(lambda: any(runner._progress.withholds for runner in pair.service.dispatcher.runners.values()))
    prefill.release.set()
    answer = await task
    assert answer.choices[0].message.content == "a red sign"
    assert len(answer.prompt_logprobs) == len(prefill.of(Generate)[0].prompt_token_ids)


async def test_log_probabilities_that_are_lost_with_a_prefill_worker_are_computed_again(trio):
    for prefill in trio.cluster.prefills:
        prefill.hold = True
    task = asyncio.create_task(trio.chat(extra_body={"prompt_logprobs": 0}))
    victim, other = await _asked(trio.cluster.prefills)
    await eventually(lambda: any(runner._progress.withholds for runner in trio.service.dispatcher.runners.values()))
    other.hold = False
    await victim.die()
    answer = await task
    assert answer.choices[0].message.content == "a red sign"
    assert answer.prompt_logprobs[1] is not None


async def test_tokens_of_an_attempt_before_the_move_are_not_taken_for_those_after_it(trio):
    """The request comes back to its only decoder, and draws other tokens there: the first ones are still on the way."""
    decoder = trio.cluster.decoders[0]
    for prefill in trio.cluster.prefills:
        prefill.hold = True
    decoder.pause_after = 1
    decoder.answer = lambda message: "a red sign" if message.attempt == 1 else "no blue door"
    task = asyncio.create_task(trio.chat(extra_body={"prompt_logprobs": 0}))
    victim, other = await _asked(trio.cluster.prefills)
    await eventually(lambda: any(runner._progress.withholds for runner in trio.service.dispatcher.runners.values()))
    late = msgspec.structs.replace(decoder.messages(decoder.of(Generate)[0])[0], attempt=1)
    other.hold, decoder.pause_after = False, 0
    await victim.die()
    await eventually(lambda: len(decoder.of(Generate)) == 2)
    await decoder.reply(decoder.proxies[0], late)
    decoder.resume.set()
    assert (await task).choices[0].message.content == "no blue door"


async def test_a_client_that_leaves_aborts_everywhere(pair):
    pair.cluster.prefills[0].script = lambda message: SILENT
    task = asyncio.create_task(pair.chat(PICTURE))
    await _asked(pair.cluster.prefills)
    task.cancel()
    await eventually(lambda: pair.aborted() == {"e0", "p0", "d0"})
    await eventually(lambda: pair.service.admission.inflight == 0)
    await eventually(lambda: not pair.cluster.prefills[0]._running and not pair.cluster.decoders[0]._running)


async def test_a_mixed_cluster_is_used_by_load(serve):
    async with serve(decoders=1, pairs=(1, 1)) as rig:
        whole, decoder = rig.cluster.decoders
        whole.pause_after = decoder.pause_after = 1
        streams = [await rig.chat(f"{number}" * 4, stream=True, max_tokens=50) for number in range(4)]
        assert [len(whole.of(Generate)), len(decoder.of(Generate))] == [2, 2]
        whole.resume.set()
        decoder.resume.set()
        for stream in streams:
            assert (await gather(stream))[0] == {0: "a red sign"}


async def test_prompts_come_back_to_both_halves_and_both_are_counted(serve):
    async with serve(decoders=0, pairs=(2, 2)) as rig:
        for _ in range(3):
            await rig.chat("the same beginning " * 40)
        for workers in (rig.cluster.prefills, rig.cluster.decoders):
            assert sorted(len(worker.of(Generate)) for worker in workers) == [0, 3]
        for metric in ("affinity_total", "decode_affinity_total"):
            counts = {outcome: rig.count(metric, outcome=outcome) for outcome in ("hit", "overloaded", "unknown")}
            assert (metric, counts) == (metric, {"hit": 2, "overloaded": 0, "unknown": 1})
        victim, other = _by_use(rig.cluster.prefills)
        victim.script = lambda message: ErrorInfo("internal_error", "boom")
        await rig.chat("the same beginning " * 40)
        assert len(other.of(Generate)) == 1
        assert rig.count("affinity_total", outcome="hit") == 3
        assert rig.count("affinity_total", outcome="unknown") == 2  # of who computes it instead, and has not had it
        assert rig.count("decode_affinity_total", outcome="hit") == 3  # it decodes where it did


async def test_whole_workers_count_no_affinity_of_decoding(rig):
    await rig.chat()
    assert rig.count("affinity_total", outcome="unknown") == 1
    assert rig.count("decode_affinity_total", outcome="unknown") == 0


async def test_half_a_pair_is_not_ready_and_says_what_is_missing(serve):
    async with serve(decoders=0, pairs=(1, 0)) as rig:
        ready = await rig.http.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "no decode worker")
        await rig.cluster.add_decoder("d")
        await rig.wait_for_workers()
        assert (await rig.http.get("/ready")).status_code == 200
