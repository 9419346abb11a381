"""Messages on their way: what they say does not depend on whose clock reads it."""

from __future__ import annotations

import time

import pytest

from common.messages import encode
from tests.security.real_messages import MESSAGES


@pytest.mark.parametrize("ahead_s", [-1e6, 3600.0])
def test_what_is_left_until_a_deadline_is_left_by_the_clock_of_another_host_too(
    monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    sent = [(decode, one) for decode, messages in MESSAGES.items() for one in messages if hasattr(one, "deadline_s")]
    assert {type(message).__name__ for _, message in sent} == {"Encode", "Offer", "KvOffer"}
    here_s = [5e6]
    monkeypatch.setattr(time, "monotonic", lambda: here_s[0])
    for decode, message in sent:
        data = encode(message)
        here_s[0] += ahead_s
        came = decode(data)
        assert came.deadline_s - here_s[0] == pytest.approx(message.deadline_s - (here_s[0] - ahead_s))
        here_s[0] -= ahead_s
