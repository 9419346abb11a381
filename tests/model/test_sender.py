"""Every state of one handoff at its sender: whatever is said, repeated or kept silent, it ends, once and in order."""

from __future__ import annotations

import pytest

from common.messages import KvOffer, Offer
from tests.model.explore import explore
from tests.model.sender import INPUT, KEYS_AND_VALUES, Sender


@pytest.mark.parametrize(
    ("offer", "num_parts"),
    [
        pytest.param(INPUT, 1, id="an encoder output"),
        pytest.param(KEYS_AND_VALUES, 2, id="keys and values in two parts", marks=pytest.mark.slow),
    ],
)
def test_every_state_of_a_handoff_has_a_defined_end(offer: Offer | KvOffer, num_parts: int) -> None:
    found = explore(Sender(offer, num_parts), Sender.copy, Sender.run_quietly, max_states=20_000)
    assert found.num_transitions > found.num_states > 100
