"""Who is let in when there is too much to do, and what a client that does not read costs the others."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from typing import Any

import openai
import pytest

from common.http import server
from common.messages import Abort, Generate, Tokens
from proxy.api import completions
from proxy.dispatch import job_runner
from proxy.server.limits import (
    FULL_LINE,
    SHORT_LINE,
    WINDOW,
    QueueDelayLimiter,
    RequestTickets,
    Ticket,
)
from tests.clock import Clock
from tests.proxy.conftest import eventually
from tests.proxy.sample_media import image_part, picture, speech
from tests.proxy.server.test_connections import connections, head


def _serve_at(line: QueueDelayLimiter, clock: Clock, tickets: list, rate: float, count: int) -> None:
    """Let the first `count` of those who wait begin, so many in a second."""
    for _ in range(count):
        clock.now_s += 1 / rate
        tickets.pop(0).release(begun=True)


def test_a_burst_is_taken_in_whole():
    clock = Clock()
    line = QueueDelayLimiter(2.0, clock)
    for _ in range(1000):
        assert line.excess_s <= 0
        line.join()
    assert line.wait_s == 0.0  # nothing is known of the rate yet


def test_a_line_that_stands_turns_away_who_would_wait_too_long():
    clock = Clock()
    line = QueueDelayLimiter(2.0, clock)
    tickets = [line.join() for _ in range(100)]
    _serve_at(line, clock, tickets, 10, WINDOW // 2)
    assert line.wait_s == pytest.approx((len(tickets) + 1) / 10)
    assert line.excess_s == pytest.approx(line.wait_s - 2.0)
    assert math.ceil(line.excess_s) == 5
    _serve_at(line, clock, tickets, 10, len(tickets) - 18)
    assert line.excess_s <= 0


def test_a_sustained_overload_keeps_the_wait_at_its_limit():
    clock, rate, limit_s = Clock(), 20.0, 2.0
    line = QueueDelayLimiter(limit_s, clock)
    tickets, refused, longest = [], 0, 0
    for step in range(2000):  # twice as many come as are served
        clock.now_s += 1 / (2 * rate)
        if line.excess_s > 0:
            refused += 1
        else:
            tickets.append(line.join())
        if step % 2 and tickets:
            tickets.pop(0).release(begun=True)
        if step > 500:
            longest = max(longest, len(tickets))
    assert 0.9 * limit_s <= longest / rate <= 1.1 * limit_s
    assert 800 < refused < 1000


def test_a_short_line_is_never_too_long_however_slow_it_is():
    clock = Clock()
    line = QueueDelayLimiter(0.1, clock)
    tickets = [line.join() for _ in range(SHORT_LINE + WINDOW)]
    _serve_at(line, clock, tickets, 0.1, WINDOW)
    assert (line.num_waiting, line.excess_s) == (SHORT_LINE, 0.0)


def test_a_rate_that_is_long_past_does_not_count():
    clock = Clock()
    line = QueueDelayLimiter(0.1, clock)
    tickets = [line.join() for _ in range(SHORT_LINE + WINDOW)]
    _serve_at(line, clock, tickets, 0.1, len(tickets))
    clock.now_s += 60
    for _ in range(100):
        line.join()
    clock.now_s += 1
    assert line.excess_s <= 0


def _moving_line(max_wait_s: float, rate: float) -> QueueDelayLimiter:
    """An empty line that has moved at this rate."""
    clock = Clock()
    line = QueueDelayLimiter(max_wait_s, clock)
    tickets = [line.join() for _ in range(SHORT_LINE + WINDOW)]
    _serve_at(line, clock, tickets, rate, WINDOW)
    for ticket in tickets:
        ticket.release()
    return line


@pytest.mark.parametrize(("rate", "joined"), [(1000.0, FULL_LINE), (1.5, 6), (0.1, SHORT_LINE)])
def test_what_can_wait_joins_a_line_that_moves_quickly_and_leaves_a_slow_one_short(rate: float, joined: int):
    line = _moving_line(10.0, rate)
    for number in range(joined):
        assert line.has_room, number
        line.join()
    assert not line.has_room
    assert line.excess_s <= 0


def test_a_line_that_was_slow_once_is_measured_again_by_those_that_can_wait():
    clock = Clock()
    line = QueueDelayLimiter(10.0, clock)
    tickets = [line.join() for _ in range(SHORT_LINE + WINDOW)]
    _serve_at(line, clock, tickets, 0.1, WINDOW)
    assert len(tickets) == SHORT_LINE
    assert not line.has_room
    for _ in range(WINDOW):  # the next one comes as soon as there is room for it, and not before
        _serve_at(line, clock, tickets, 1000.0, 1)
        tickets.append(line.join())
    assert line.has_room


def test_a_job_takes_a_ticket_of_its_request_and_each_that_nobody_knew_of_its_own():
    line = QueueDelayLimiter(1.0)
    tickets = RequestTickets(line, [line.join(), line.join()])
    assert (line.num_waiting, tickets.num_waiting) == (2, 0)
    first, second, third = (tickets.acquire() for _ in range(3))
    assert (line.num_waiting, tickets.num_waiting) == (3, 3)
    second.release(begun=True)
    assert (line.num_waiting, tickets.num_waiting, first.waits) == (2, 2, True)
    third.release()
    tickets.release()
    assert (line.num_waiting, tickets.num_waiting) == (0, 0)
    unused = RequestTickets(line, [line.join() for _ in range(3)])
    unused.release()
    assert line.num_waiting == 0


def test_a_ticket_counts_once():
    line = QueueDelayLimiter(1.0)
    ticket = line.join()
    ticket.release(begun=True)
    ticket.release(begun=True)
    ticket.release()
    assert line.num_waiting == 0


def _overload(line: QueueDelayLimiter) -> list[Ticket]:
    """A line that has moved by one in a tenth of a second, for long; who still waits in it."""
    clock = Clock()
    line._clock = clock
    tickets = [line.join() for _ in range(200)]
    _serve_at(line, clock, tickets, 10, WINDOW)
    return tickets


async def test_the_told_wait_is_longer_than_the_allowed_one(serve):
    async with serve(max_queue_s=6.0) as rig:
        waiting = [ticket for ticket in _overload(rig.service.lines["text"]) if ticket.waits]
        for ticket in waiting[63:]:
            ticket.release()
        assert 6.0 < rig.service.lines["text"].wait_s < 6.5
        with pytest.raises(openai.RateLimitError, match="after some 7 s, more than the 6 s allowed"):
            await rig.chat("text")
        for ticket in waiting:
            ticket.release()


async def test_who_would_wait_too_long_is_refused_before_its_media_are_fetched(serve):
    async with serve(max_queue_s=2.0) as rig:
        waiting = _overload(rig.service.lines["media"])
        part = {"type": "image_url", "image_url": {"url": "http://192.0.2.1/never-asked.png"}}
        with pytest.raises(openai.RateLimitError, match="max_queue_s") as caught:
            await rig.chat([part])
        assert int(caught.value.response.headers["retry-after"]) == 12
        assert rig.count("refused_total", reason="wait") == 1
        assert rig.count("media_items_total", kind="image") == 0
        assert (await rig.chat("text is another line")).choices[0].message.content == "a red sign"
        metrics = (await rig.http.get("/metrics")).text
        assert 'triptych_proxy_waiting{line="media"} 136.0' in metrics
        assert 'triptych_proxy_expected_wait_seconds{line="media"} 13.7' in metrics
        for ticket in waiting:
            ticket.release()


async def test_a_response_that_would_wait_too_long_is_told_for_how_long_as_a_chat_is(serve):
    async with serve(max_queue_s=2.0) as rig:
        waiting = _overload(rig.service.lines["media"])
        content = [{"type": "input_image", "image_url": "http://192.0.2.1/never-asked.png"}]
        with pytest.raises(openai.RateLimitError, match="max_queue_s") as caught:
            await rig.client.responses.create(model=rig.model, input=[{"role": "user", "content": content}])
        assert int(caught.value.response.headers["retry-after"]) == 12
        assert caught.value.param is None
        for ticket in waiting:
            ticket.release()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_chat_with_a_speech_model_is_refused_before_its_body_has_come(serve, whisper_model, path):
    async with serve(whisper_model.folder, max_queue_s=2.0) as rig, connections(rig, 1) as [(reader, writer)]:
        waiting = _overload(rig.service.lines["media"])
        writer.write(head(path, 1000))
        async with asyncio.timeout(10):
            assert b" 429 " in await reader.readline()
        for ticket in waiting:
            ticket.release()


async def test_requests_leave_the_line_with_their_first_token_or_their_end(rig):
    lines = rig.service.lines
    rig.cluster.decoders[0].pause_after = 0
    leaving = asyncio.create_task(rig.chat([image_part(picture())]))
    staying = asyncio.create_task(rig.chat(stream=True))
    await eventually(lambda: (lines["text"].num_waiting, lines["media"].num_waiting) == (1, 1))
    leaving.cancel()
    rig.cluster.decoders[0].pause_after = 1
    await eventually(lambda: lines["media"].num_waiting == 0)
    rig.cluster.decoders[0].resume.set()
    await (await staying).close()
    assert lines["text"].num_waiting == 0
    with pytest.raises(openai.BadRequestError):
        await rig.chat([image_part(b"no picture")])
    assert lines["media"].num_waiting == 0


async def test_windows_of_a_recording_wait_side_by_side_but_one_by_one_where_many_wait(monkeypatch, speech_rig):
    line, decoder, lengths = speech_rig.service.lines["media"], speech_rig.cluster.decoders[0], list[int]()

    def join() -> Ticket:
        ticket = QueueDelayLimiter.join(line)
        lengths.append(line.num_waiting)
        return ticket

    async def hear() -> str:
        create = speech_rig.client.audio.transcriptions.create
        return (await create(model=speech_rig.model, file=("long.wav", speech(400)), language="en")).text

    monkeypatch.setattr(line, "join", join)
    others = [line.join() for _ in range(FULL_LINE)]
    assert await hear()
    assert (len(decoder.of(Generate)), max(lengths)) == (15, FULL_LINE + 1)
    for ticket in others:
        ticket.release()
    decoder.pause_after = 0
    hearing = asyncio.create_task(hear())
    await eventually(lambda: line.num_waiting == FULL_LINE)
    decoder.resume.set()
    assert await hearing
    assert line.num_waiting == 0


async def test_prompts_of_one_request_wait_in_the_line_each_and_from_the_beginning(monkeypatch, rig):
    """Others that come while they are still being tokenised would be let in, else."""
    line, decoder, tokenised = rig.service.lines["text"], rig.cluster.decoders[0], asyncio.Event()
    make_jobs = completions.make_jobs

    async def slowly(*arguments: Any) -> Any:
        await tokenised.wait()
        return await make_jobs(*arguments)

    monkeypatch.setattr(completions, "make_jobs", slowly)
    decoder.pause_after = 0
    asking = asyncio.create_task(rig.client.completions.create(model=rig.model, prompt=["a", "b", "c"]))
    await eventually(lambda: line.num_waiting == 3)
    tokenised.set()
    await eventually(lambda: len(decoder.of(Generate)) == 3)
    assert line.num_waiting == 3
    decoder.resume.set()
    assert len((await asking).choices) == 3
    assert line.num_waiting == 0
    with pytest.raises(openai.BadRequestError, match="1 to 128 prompts"):
        await rig.client.completions.create(model=rig.model, prompt=["a"] * 129)
    assert line.num_waiting == 0


async def test_two_hundred_cancelled_at_once_leave_nothing(serve):
    async with serve(encoders=2, decoders=2) as rig:
        for decoder in rig.cluster.decoders:
            decoder.pause_after = 0
        message = {"role": "user", "content": [image_part(picture())]}
        clients = [_ask(rig, "/v1/chat/completions", {"messages": [message]}) for _ in range(200)]
        await eventually(lambda: sum(len(d.of(Generate)) for d in rig.cluster.decoders) == 200)
        for client in clients:
            client.close()
        await eventually(lambda: not any(d._running for d in rig.cluster.decoders))
        await eventually(lambda: rig.service.admission.inflight == 0)
        await rig.assert_clean()
        assert all(line.num_waiting == 0 for line in rig.service.lines.values())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_client_that_reads_nothing_is_ended_and_disturbs_nobody(serve, monkeypatch, path):
    monkeypatch.setattr(job_runner, "MAX_UNREAD", 256)
    async with serve() as rig:
        decoder = rig.cluster.decoders[0]
        count = 20_000
        decoder.messages = lambda message: (Tokens(message.request_id, place, [5]) for place in range(count))
        with _unread(rig, path):
            await eventually(lambda: len(rig.service.dispatcher.runners) == 1)
            (unread,) = rig.service.dispatcher.runners.values()
            await eventually(lambda: bool(decoder.of(Abort)))
            assert len(decoder.of(Generate)) == 1
            assert rig.count("unread_answers_total") == rig.count("aborts_total") == 1
            assert not unread._events
            assert len(unread._progress._sequences[0].token_ids) < count
            assert rig.service.pool.workers("prefill_decode")[0].load.requests == 0
            del decoder.messages
            assert (await rig.chat()).choices[0].message.content == "a red sign"
        await eventually(lambda: rig.service.admission.inflight == 0)
        assert rig.count("unread_answers_total") == 1


async def test_the_connection_of_a_client_that_reads_nothing_is_closed(serve, monkeypatch):
    monkeypatch.setattr(server, "UNREAD_MS", 500)
    async with serve() as rig:
        rig.cluster.decoders[0].messages = lambda message: (Tokens(message.request_id, n, [5]) for n in range(5000))
        with _unread(rig, "/v1/completions"):
            await eventually(lambda: rig.service.admission.inflight == 1)
            await eventually(lambda: rig.service.admission.inflight == 0)
            await eventually(lambda: not rig.cluster.decoders[0]._running)


def _unread(rig, path: str) -> socket.socket:
    """A connection on which a stream has been asked for, and from which nobody reads."""
    fields = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    return _ask(rig, path, {**fields, "stream": True})


def _ask(rig, path: str, fields: dict[str, Any]) -> socket.socket:
    """A connection on which a request has been sent."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(rig.base_url.rpartition(":")[2])))
    body = json.dumps(fields)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall((head + body).encode())
    return connection
