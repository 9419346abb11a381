"""How the tests are spread over processes (`-n 2 --dist loadgroup`, which is what `make test` does)."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Clusters one after the other, in one process: they take all cores, and what they leave behind is looked for.
    All else goes beside them, file by file, for the sake of what the tests of a file share."""
    for item in items:
        clusters = item.get_closest_marker("cluster") or item.get_closest_marker("chaos")
        group = "clusters" if clusters else item.path.relative_to(item.config.rootpath).as_posix()
        item.add_marker(pytest.mark.xdist_group(group))
