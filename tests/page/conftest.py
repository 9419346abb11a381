"""Clusters as `triptych serve` starts them, and a Chromium whose complaints fail the test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.launch.cli.serving import Serving
from tests.page.browser import ADVICE, find

LOCKED = re.compile("status of 401")
"""What Chromium says of every request that is answered with 401, also where that is how the page learns of keys."""
WATCH = """addEventListener("securitypolicyviolation",
  (event) => console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`))"""


class Browser:
    """Opens pages. Errors of scripts and console, and what the policy forbade, are complaints."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium

    @contextmanager
    def page(self, url: str, expected: re.Pattern[str] | None = None, **options: Any) -> Iterator[Any]:
        """A page of a fresh session at `url`, whose complaints are none but `expected`."""
        options = {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light", **options}
        context = self._chromium.new_context(permissions=["clipboard-read", "clipboard-write", "microphone"], **options)
        page = context.new_page()
        page.add_init_script(WATCH)
        complaints: list[str] = []
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        requests: list[str] = []
        page.on("request", lambda sent: requests.append(sent.url))
        page.goto(url)
        try:
            yield page
        finally:
            context.close()
        assert [text for text in complaints if expected is None or not expected.search(text)] == []
        assert [sent for sent in requests if not sent.startswith((url, "data:", "blob:"))] == []


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="`make page-test` installs playwright")
    path = find()
    if path is None:
        pytest.skip(ADVICE)
    flags = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=flags)
        yield Browser(chromium)
        chromium.close()


@contextmanager
def served(folder: Path, *arguments: str) -> Iterator[Serving]:
    serving = Serving(folder, *arguments)
    try:
        serving.wait_until("page at")
        yield serving
    finally:
        serving.close()
