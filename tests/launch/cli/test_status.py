"""`triptych status`: what it shows of instances that the registry has."""

from __future__ import annotations

from rich.console import Console

from common.messages import PROTOCOL_VERSION
from launch.cli.members import refusals, status_table
from tests.broker.conftest import make_record

NOW_S = 1_700_000_100.0
PROXY = make_record("proxy0", "proxy", dtype="", epoch=int((NOW_S - 90 * 60) * 1e9))
ENCODER = make_record("e0", "encoder", epoch=int((NOW_S - 42) * 1e9))
OLD = make_record("d0", "prefill_decode", epoch=int((NOW_S - 600) * 1e9), protocol=PROTOCOL_VERSION - 1)
LEAVING = make_record("d1", "prefill_decode", epoch=int((NOW_S - 600) * 1e9), draining=True)
RECORDS = [PROXY, ENCODER, OLD, LEAVING]


def rows() -> dict[str, list[str]]:
    console = Console(width=200, no_color=True)
    with console.capture() as captured:
        console.print(status_table(RECORDS, "title", NOW_S, refusals(RECORDS)))
    return {line.split()[0]: line.split() for line in captured.get().splitlines()}


def test_a_worker_is_ready_or_draining_or_not_used_by_the_proxy() -> None:
    shown = rows()
    assert shown["e0"][-1] == shown["proxy0"][-1] == "ready"
    assert shown["d1"][-1] == "draining"
    assert shown["d0"][-2:] == ["not", "used"]


def test_how_long_instances_have_been_there_is_told_in_their_own_measure() -> None:
    shown = {name: " ".join(row) for name, row in rows().items()}
    assert " 42 s " in shown["e0"]
    assert " 10 min " in shown["d0"]
    assert " 1.5 h " in shown["proxy0"]


def test_the_reason_names_both_and_what_differs() -> None:
    (why,) = refusals(RECORDS).values()
    assert all(word in why for word in ("d0", "proxy0", "protocol version", str(PROTOCOL_VERSION - 1)))


def test_without_a_proxy_nobody_is_refused() -> None:
    assert refusals([ENCODER, OLD]) == {}
