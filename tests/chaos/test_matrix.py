"""Every kind of fault in the matrix at least once, at drawn moments: `make chaos MATRIX=1`, some half an hour.

Each cell goes to one of the setups, by the seed: pictures or sounds. CHAOS_SEED=N makes the same rounds again,
CHAOS_MATRIX=2 two of every cell. What came of it is printed in the end as a table.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.chaos.drawing import Cell, matrix
from tests.chaos.harness import IN_FLIGHT, ChaosHarness
from tests.chaos.test_rounds import SEED

TURNS = int(os.environ.get("CHAOS_MATRIX") or 0)
PICTURES, SOUNDS = "signpost 2e2p2d2pd zmq", "whisper 2e2p2d2pd auto"
"""Two workers of each role. Over ZMQ tensors go through the cables, too: what is cut off both ways belongs there."""
pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.timeout(400)]


def cells_of(setup: str) -> list[Cell]:
    """Its share of the cells, as often as there are turns."""
    rng, found = random.Random(f"{SEED} places"), []
    for cell in [*matrix()] * TURNS:
        drawn = rng.choice((PICTURES, SOUNDS))
        found += [cell] if setup == (PICTURES if cell.cuts_tensors else drawn) else []
    return found


class Table:
    """Rounds and failures by group of cells."""

    def __init__(self) -> None:
        self._cells: dict[str, set[str]] = {}
        self._rounds = Counter[str]()
        self._failures = Counter[str]()

    def note(self, cell: Cell, *, failed: bool) -> None:
        self._cells.setdefault(cell.group, set()).add(str(cell))
        self._rounds[cell.group] += 1
        self._failures[cell.group] += failed

    def __str__(self) -> str:
        rows = [
            f"| {group} | {len(cells)} | {self._rounds[group]} | {self._failures[group]} |"
            for group, cells in self._cells.items()
        ]
        cells = sum(map(len, self._cells.values()))
        total = f"| all | {cells} of {len(matrix())} | {self._rounds.total()} | {self._failures.total()} |"
        return "\n".join(["| what | cells | rounds | failures |", "|---|---|---|---|", *rows, total])


@pytest.fixture(scope="session")
def table() -> Iterator[Table]:
    """Printed once all rounds are over."""
    table = Table()
    yield table
    print(f"\nCHAOS_SEED={SEED}\n{table}")


CELLS = [(setup, cell) for setup in (PICTURES, SOUNDS) for cell in cells_of(setup)]


@pytest.mark.parametrize(("arena_of", "cell"), CELLS, indirect=["arena_of"], ids=str)
async def test_cell(arena_of: ChaosHarness, cell: Cell, table: Table, request: pytest.FixtureRequest) -> None:
    await _endure(arena_of, cell, table, request.node.name)


async def _endure(arena_of: ChaosHarness, cell: Cell, table: Table, name: str) -> None:
    roles = {instance.id: instance.role for instance in arena_of.cluster.instances.values()}
    faults = cell.draw(random.Random(f"{SEED} {name}"), roles)
    print(f"\nCHAOS_SEED={SEED}, {name}: {'; '.join(map(str, faults))}")
    try:
        done = await arena_of.endure(*faults)
        assert done.in_flight_at_fault[0] == IN_FLIGHT
    except BaseException as error:
        print(f"FAILED: {error}")  # at once: the run is a long one
        table.note(cell, failed=True)
        raise
    print(dict(done.endings))
    table.note(cell, failed=False)
