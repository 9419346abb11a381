"""Latencies hop by hop, from what both sides of a handoff have noted."""

from __future__ import annotations

from services.process.handoff_trace import MAX_KEPT, HandoffTrace, hop_latencies, summary
from services.process.metrics import WorkerMetrics


def test_both_sides_are_joined_by_key() -> None:
    sender, receiver = HandoffTrace(), HandoffTrace()
    for number in range(3):
        sender.mark(("r", number, 0), "offer_sent", 10.0)
        receiver.mark(("r", number, 0), "offer_received", 10.001 + number)
    receiver.mark(("other", 0, 0), "offer_received", 99.0)
    latencies = hop_latencies([sender.as_json(), receiver.as_json()])
    assert [round(value, 3) for value in latencies["offer_sent -> offer_received"]] == [0.001, 1.001, 2.001]
    assert "1001.000" in summary(latencies)
    assert "granted" not in summary(latencies)
    assert summary(hop_latencies([])).startswith("no handoff yet")


def test_a_hop_over_a_clock_that_was_set_back_takes_no_time() -> None:
    metrics, key = WorkerMetrics(), ("r", 0, 0)
    recorder = HandoffTrace(metrics.hop_seconds)
    recorder.mark(key, "offer_received", 3600.0)
    recorder.mark(key, "granted", 1.0, since="offer_received")
    [seconds] = [line for line in metrics.render().decode().splitlines() if "hop_seconds_sum" in line]
    assert seconds == 'triptych_handoff_hop_seconds_sum{hop="offer_received_to_granted"} 0.0'


def test_the_first_time_counts_and_old_handoffs_are_forgotten() -> None:
    metrics, key = WorkerMetrics(), ("first", 0, 0)
    recorder = HandoffTrace(metrics.hop_seconds)
    recorder.mark(key, "offer_received", 0.5)
    recorder.mark(key, "stored", 1.0, since="offer_received")
    recorder.mark(key, "stored", 2.0, since="offer_received")
    recorder.mark(key, "landed", 0.7, since="granted")
    [seconds] = [line for line in metrics.render().decode().splitlines() if "hop_seconds_sum" in line]
    assert seconds == 'triptych_handoff_hop_seconds_sum{hop="offer_received_to_stored"} 0.5'
    for number in range(MAX_KEPT):
        recorder.mark(("r", number, 0), "stored")
    assert len(recorder.as_json()) == MAX_KEPT
    assert "first" not in {noted["request_id"] for noted in recorder.as_json()}
