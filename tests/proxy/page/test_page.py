"""The page's files: served to anybody under a strict policy, whole, small, and without a word to other hosts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from proxy.page.routes import FOLDER, HEADERS
from tests.proxy.conftest import ProxyHarness

MAX_LINES = 1500
TEXTS = {path.name: path.read_text() for path in sorted(FOLDER.iterdir()) if path.suffix in (".html", ".css", ".js")}
SCRIPTS = {name: text for name, text in TEXTS.items() if name.endswith(".js")}


async def test_the_page_is_at_the_root_and_every_file_has_its_type_and_the_policy(rig: ProxyHarness) -> None:
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    paths = ["/", *(f"/page/{path.name}" for path in FOLDER.iterdir())]
    for path in paths:
        response = (await rig.http.get(path)).raise_for_status()
        file = FOLDER / (path.removeprefix("/page/") if path != "/" else "index.html")
        assert response.content == file.read_bytes()
        assert response.headers["content-type"].startswith(kinds.get(file.suffix, "image/png"))
        assert {name: response.headers[name] for name in HEADERS} == HEADERS


async def test_a_look_at_the_root_without_content_is_answered(serve) -> None:
    """As `curl -I` and monitors look."""
    async with serve(api_key="right") as rig:
        looked, whole = await rig.http.head("/"), await rig.http.get("/")
        assert (looked.status_code, looked.content) == (200, b"")
        assert looked.headers["content-length"] == whole.headers["content-length"] == str(len(whole.content))


def test_the_policy_allows_this_server_alone_and_no_code_within_the_page() -> None:
    policy = dict(rule.split(" ", 1) for rule in HEADERS["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert not re.search(r"unsafe|http|\*", HEADERS["Content-Security-Policy"])
    assert HEADERS["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("name", ["nothing.js", "..%2Froutes.py", "%2e%2e/routes.py", "index.html%00", "routes.py"])
async def test_any_other_name_is_not_found(rig: ProxyHarness, name: str) -> None:
    response = await rig.http.get(f"/page/{name}")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


async def test_the_page_needs_no_key_and_opens_no_other_path(serve) -> None:
    async with serve(api_key="right") as rig:
        for path, status in (("/", 200), ("/page/main.js", 200), ("/v1/models", 401), ("/page", 401)):
            assert (await rig.http.get(path)).status_code == status, path


def test_the_page_stays_within_its_budget() -> None:
    assert sum(text.count("\n") for text in TEXTS.values()) <= MAX_LINES


def test_nothing_comes_from_elsewhere_and_nothing_breaks_the_policy() -> None:
    for name, text in TEXTS.items():
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == [], name
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|\beval\(|new Function", "".join(SCRIPTS.values()))
    html = TEXTS["index.html"]
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=\"/page/main.js\"></script>)", html)


def test_every_file_that_is_named_exists_and_every_file_is_named() -> None:
    everything = "".join(TEXTS.values())
    named = set(re.findall(r"/page/([\w.]+)", everything)) | set(re.findall(r'from "\./([\w.]+)"', everything))
    assert named == {path.name for path in FOLDER.iterdir()} - {"index.html"}


def test_every_element_that_a_script_looks_for_is_in_the_page() -> None:
    ids = re.findall(r'\sid="([\w-]+)"', TEXTS["index.html"])
    wanted = {name for text in SCRIPTS.values() for name in re.findall(r'find\("([\w-]+)"\)', text)}
    assert len(ids) == len(set(ids))
    assert wanted <= set(ids), wanted - set(ids)


def test_everything_that_is_operated_has_a_name() -> None:
    """A label, text or aria-label for each field, button and dialog, as screen readers need."""
    html = TEXTS["index.html"]
    for tag in re.findall(r"<(?:button|dialog|section|ol|ul)\b[^>]*>(?:\s*<[^>]*>)*[^<]*", html):
        assert re.search(r"aria-label|>\s*[^\s<>]+[^<>]*$", tag), tag
    for field in re.findall(r"<(?:input|textarea)\b[^>]*>", html):
        name = re.search(r'id="([\w-]+)"', field)
        is_hidden, labelled = " hidden" in field, f'for="{name[1] if name else ""}"' in html
        assert is_hidden or labelled or re.search(rf"<label[^>]*>[^<]*{re.escape(field)}", html), field


def test_the_wheel_takes_the_files_along() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    (pattern,) = project["tool"]["setuptools"]["package-data"]["proxy"]
    assert set((FOLDER.parents[1]).glob(pattern)) == set(FOLDER.iterdir())
