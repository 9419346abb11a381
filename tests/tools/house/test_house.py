"""The ratchets of tools.house count what they name."""

from __future__ import annotations

import pytest

from tools.house.measure import Census, figures, show

MODULE = '''"""What this is: it counts."""

class Thing:
    """A thing."""

class _Own: ...

async def longer():
    """Where it goes.

    It is not counted here.
    """
'''


def test_sizes_names_and_prose_are_counted() -> None:
    census = Census()
    for name in ("proxy/one.py", "proxy/two.py", "proxy/__init__.py"):
        census.add(name, MODULE)
    assert (census.modules["proxy"], census.shared_names) == (2, ["Thing"])
    assert (census.words, census.pronouns) == (3 * 10, 3 * 3)
    assert census.relatives[:2] == ["proxy/one.py:1", "proxy/one.py:8"]
    found = figures({"proxy/one.py": MODULE, "tools/a.py": "\n" * 7, "tests/b.py": "\n"}, census, "a\nb\n")
    assert (found["product lines"], found["tools lines"], found["test lines"]) == (12, 7, 1)
    assert (found["pronouns, % of docstring words"], found["longest function"], found["README lines"]) == (30.0, 5, 2)


def test_a_figure_over_its_limit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert show({"README lines": 120, "test lines": 10**9})
    assert not show({"README lines": 121})
    assert "over its limit: README lines: move details" in capsys.readouterr().out
