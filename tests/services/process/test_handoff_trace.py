"""Latencies hop by hop, from what both sides of a handoff have noted."""

from __future__ import annotations

from services.process.handoff_trace import MAX_KEPT, HandoffTrace, hop_latencies, summary


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


def test_the_first_time_counts_and_old_handoffs_are_forgotten() -> None:
    recorder = HandoffTrace()
    recorder.mark(("first", 0, 0), "stored", 1.0)
    recorder.mark(("first", 0, 0), "stored", 2.0)
    recorder.mark(("first", 0, 0), "offer_received", 0.5)
    assert recorder.elapsed_s(("first", 0, 0), "offer_received", "stored") == 0.5
    assert recorder.elapsed_s(("first", 0, 0), "granted", "stored") is None
    for number in range(MAX_KEPT):
        recorder.mark(("r", number, 0), "stored")
    assert len(recorder.as_json()) == MAX_KEPT
    assert recorder.elapsed_s(("first", 0, 0), "offer_received", "stored") is None
