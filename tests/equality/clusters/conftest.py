"""The requests of the cluster under test; test_topologies.py, whose clusters share models, has its own."""

from __future__ import annotations

import pytest

from tests.equality.cases import Case, CasesOf
from tests.equality.served import Served


@pytest.fixture
def cases(served: Served, cases_of: CasesOf) -> list[Case]:
    return cases_of(served.prefix)
