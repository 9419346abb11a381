"""Every state of one handoff at its sender: whatever is said, repeated or kept silent, it ends, once and in order."""

from __future__ import annotations

from tests.model.explore import explore
from tests.model.sender import Sender


def test_every_state_of_a_handoff_has_a_defined_end() -> None:
    found = explore(Sender(), Sender.copy, Sender.run_quietly, max_states=5000)
    assert found.num_transitions > found.num_states > 100
