"""How the tests are spread over processes (`-n 2 --dist loadscope`, as `make test` does), and what all may use."""

from __future__ import annotations

import gc
import logging
import ssl
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import structlog

CLUSTERS = ("pytest.mark.cluster", "pytest.mark.chaos")
COMPARING = frozenset(
    f"tests/equality/clusters/test_{name}.py"
    for name in ("encdec", "families", "more_families", "topologies", "weights")
)
"""Their clusters are asked for answers alone: nothing is killed, no moment matters, and what is left is looked for by
each cluster's own name."""

_create_context = ssl.create_default_context
hypothesis.settings.register_profile("busy machine", deadline=None)


def pytest_configure() -> None:
    """HTTP clients read the world's certificates for 30 ms each, also those that speak plain HTTP: here, once.

    No example has to end within 200 ms, as hypothesis would have it.
    """
    hypothesis.settings.load_profile("busy machine")
    shared = cache(_create_context)

    def create(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        alone = not args and kwargs.keys() == {"cafile"}
        return (shared if alone else _create_context)(*args, **kwargs)

    ssl.create_default_context = create

    configure = structlog.configure

    def configure_for_now(**settings: Any) -> None:
        """A command called in this process must not decide what the loggers of later tests say."""
        configure(**{**settings, "cache_logger_on_first_use": False})

    structlog.configure = configure_for_now


@pytest.fixture(autouse=True)
def default_logs() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def quiet_logs() -> Iterator[None]:
    """For tests in which thousands of things go wrong, all as they should."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """PyTorch, transformers and all tests are 600,000 objects that stay. Python's collector is off while they are
    imported, which saves a quarter of that time, and passes them over afterwards: 0.3 s of each full collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """What nobody refers to any more ends now, and says what it has to say. Plugins import modules at the end, and a
    traceback that is printed amid an import breaks that in Python 3.11: both parse, one in the other."""
    gc.collect()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files with clusters one after the other, in one process: clusters take all cores, and what they leave behind is
    looked for. All others go beside them, file by file, for the sake of what the tests of a file share.

    So do the files of `COMPARING`: they are about a third of the time that clusters take, and have models and
    references in common with the tests of `LLM`. They come before the others, so that what is left in the end is short.

    Not by `xdist_group`: pytest-xdist 3.8 writes that into `Item._nodeid`, which pytest 9 does not read.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "clusters" if has_clusters(config.rootpath / file) and file not in COMPARING else file

        def _assign_work_unit(self, node: Any) -> None:
            first = min(self.workqueue, key=lambda scope: (scope != "clusters", scope not in COMPARING))
            self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


@cache
def has_clusters(file: Path) -> bool:
    """Whether any test of a file starts a cluster, by its marks."""
    text = file.read_text()
    return any(mark in text for mark in CLUSTERS)
