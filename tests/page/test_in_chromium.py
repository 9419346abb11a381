"""The page in a real Chromium over real clusters: what a person does, and what the page shows of it.

With the variable PAGE_IMAGES, a folder, the screenshots of the documentation are written there.
"""

from __future__ import annotations

import base64
import io
import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.launch.cli.serving import Serving
from tests.page.conftest import LOCKED, Browser, served
from tests.tiny_models import make_whisper
from tests.video_files import video_file
from tools.signpost.scenes import render

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(500)]

DROP = """([name, type, data, event]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type }));
  const options = { bubbles: true, cancelable: true };
  const made = event === "paste" ? new ClipboardEvent("paste", { ...options, clipboardData: transfer })
    : new DragEvent("drop", { ...options, dataTransfer: transfer });
  document.getElementById("prompt").dispatchEvent(made);
}"""
STAGES = {"proxy", "queue", "inputs", "prefill", "decode", "preprocess", "grant", "encode", "handoff"}
MAX_IMAGE_BYTES = 150_000
KEY = "a-key-for-the-page"


def _scene(seed: int) -> tuple[bytes, str]:
    """A sign that no other test shows, and its text."""
    scene = render(random.Random(seed), (168, 112))
    buffer = io.BytesIO()
    scene.image.save(buffer, "PNG")
    return buffer.getvalue(), scene.answers["text"]


def _until(page: Any, condition: str) -> None:
    """Wait for a condition in JavaScript: the policy forbids playwright's own way."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"this did not come true: {condition}")


def _give(page: Any, name: str, kind: str, data: bytes, event: str = "drop") -> None:
    page.evaluate(DROP, [name, kind, base64.b64encode(data).decode(), event])


def _ask(page: Any, question: str = "What does the sign say?") -> str:
    """Ask by keyboard; return the answer, with the stages of its request complete."""
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")
    page.wait_for_selector("article:first-child button.link", timeout=60_000)
    return str(page.inner_text("article:first-child .answer"))


def _shot(page: Any, name: str, *, full_page: bool = True) -> None:
    """Write a screenshot of 256 colours."""
    if folder := os.environ.get("PAGE_IMAGES"):
        image = Image.open(io.BytesIO(page.screenshot(full_page=full_page))).convert("RGB")
        path = Path(folder) / f"{name}.png"
        image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
        assert path.stat().st_size <= MAX_IMAGE_BYTES


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with served(tmp_path_factory.mktemp("seeing"), "signpost", "--topology", "2e1pd", "--cluster", "page") as serving:
        yield serving


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A speech model behind a key."""
    folder = tmp_path_factory.mktemp("listening")
    model = make_whisper(folder / "tiny-whisper")
    (folder / "keys").write_text(KEY)
    keys = ("--api-key-file", str(folder / "keys"))
    with served(folder, str(model), "--topology", "1e1pd", "--cluster", "page-keys", *keys) as serving:
        yield serving


def test_a_dropped_picture_is_answered_and_all_its_stages_are_there(browser: Browser, cluster: Serving) -> None:
    picture, text = _scene(1)
    with browser.page(cluster.base_url) as page:
        page.wait_for_selector(".card[data-id=pd0][data-state=ready]")
        assert "2e1pd" in page.inner_text("#model")
        _give(page, "sign.png", "image/png", picture)
        page.wait_for_selector("#attached img")
        assert _ask(page) == text
        _until(page, f"document.querySelectorAll('#stages .row').length >= {len(STAGES)}")
        rows = page.eval_on_selector_all("#stages .row", "rows => rows.map((row) => row.getAttribute('aria-label'))")
        assert {row.split(" on ")[0] for row in rows} == STAGES
        assert {re.search(r" on (\w+),", row)[1] for row in rows} >= {"proxy", "pd0"}  # type: ignore[index]
        _walk(page, len(rows))
        for seed in range(20, 28):
            _send(cluster, seed)
        _until(page, "document.querySelectorAll('#requests li').length >= 9")
        _shot(page, "page")


def _walk(page: Any, number: int) -> None:
    """Walk through a request of the list, by keyboard alone, and back."""
    page.focus("#requests button")
    page.keyboard.press("Enter")
    page.wait_for_selector("#walk[open]")
    seen = [page.inner_text("#walk-stage h3")]
    for _ in range(number - 1):
        page.keyboard.press("ArrowRight")
        seen.append(page.inner_text("#walk-stage h3"))
    assert page.inner_text("#walk-count") == f"stage {number} of {number}"
    assert {stage.split()[0] for stage in seen} == STAGES
    page.keyboard.press("Escape")
    page.wait_for_selector("#walk", state="hidden")


def _send(cluster: Serving, seed: int) -> None:
    url = f"data:image/png;base64,{base64.b64encode(_scene(seed)[0]).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What does the sign say?"}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0}
    httpx.post(f"{cluster.base_url}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def test_a_pasted_picture_goes_along_and_the_copied_command_gets_the_same_answer(
    browser: Browser, cluster: Serving, tmp_path: Path
) -> None:
    picture, text = _scene(2)
    name = "my $HOME `sign`'s.png"
    with browser.page(cluster.base_url) as page:
        page.wait_for_selector(".card")
        _give(page, name, "image/png", picture, "paste")
        page.wait_for_selector("#attached img")
        page.fill("#prompt", "What does the sign say?")
        page.click("#curl")
        _until(page, "document.getElementById('curl').textContent === 'Copied'")
        command = page.evaluate("navigator.clipboard.readText()")
    (tmp_path / name).write_bytes(picture)
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == text, done.stderr


def test_an_uploaded_video_of_a_sign_is_read(browser: Browser, cluster: Serving) -> None:
    picture, text = _scene(3)
    frame = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))
    with browser.page(cluster.base_url) as page:
        page.wait_for_selector(".card[data-id=pd0][data-state=ready]")
        video = {"name": "signs.mp4", "mimeType": "video/mp4", "buffer": video_file(np.stack([frame] * 12))}
        page.set_input_files("#file-video", files=[video])
        page.wait_for_selector("#attached video")
        assert "signs.mp4" in page.inner_text("#attached")
        assert _ask(page) == text
        rows = page.eval_on_selector_all("#stages .row", "rows => rows.map((row) => row.getAttribute('aria-label'))")
        assert {"encode", "handoff", "decode"} <= {row.split(" on ")[0] for row in rows}


def test_what_the_model_cannot_take_is_struck_out_and_says_why(browser: Browser, cluster: Serving) -> None:
    with browser.page(cluster.base_url) as page:
        page.wait_for_selector("#add-audio[aria-disabled=true]")
        assert page.get_attribute("#add-image", "aria-disabled") == "false"
        page.click("#record", force=True)
        assert "takes pictures and video, audio needs another" in page.inner_text("#ask-problem")
        _give(page, "song.mp3", "audio/mpeg", b"ID3")
        _until(page, "document.getElementById('ask-problem').textContent.startsWith('song.mp3 is not taken')")
        _give(page, "notes.txt", "text/plain", b"words")
        _until(page, "document.getElementById('ask-problem').textContent.startsWith('notes.txt is neither')")
        assert page.query_selector("#attached li") is None


def test_an_error_is_a_sentence_and_stop_ends_an_answer(browser: Browser, cluster: Serving) -> None:
    with browser.page(cluster.base_url, expected=re.compile("status of 400")) as page:
        page.wait_for_selector("#add-audio[aria-disabled=true]")
        _give(page, "broken.png", "image/png", b"\x89PNG\r\n\x1a\n but no more")
        page.wait_for_selector("#attached li")
        page.press("#prompt", "Enter")
        _until(page, "document.querySelector('article .problem')?.textContent.endsWith('.')")
        assert "is not in one of the formats" in page.inner_text("article .problem")
        page.click("#clear")
        page.route("**/v1/chat/completions", lambda route: None)  # never answered
        page.press("#prompt", "Enter")
        page.click("#stop")
        _until(page, "document.querySelector('article .problem')?.textContent === 'Stopped.'")
        assert page.is_enabled("#ask")


def test_the_phone_and_the_dark_show_all_without_scrolling_sideways(browser: Browser, cluster: Serving) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    for name, options in {"page-phone": phone, "page-narrow": {"viewport": {"width": 320, "height": 600}}}.items():
        with browser.page(cluster.base_url, **options) as page:
            page.wait_for_selector(".card")
            page.tap("#sample") if "has_touch" in options else page.click("#sample")
            page.wait_for_selector("#attached img")
            assert _ask(page) == "CAFE"
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            if name == "page-phone":
                _shot(page, name, full_page=False)


def test_a_killed_encoder_is_shown_as_lost_and_as_back(browser: Browser, cluster: Serving) -> None:
    picture, text = _scene(3)
    with browser.page(cluster.base_url, color_scheme="dark") as page:
        page.wait_for_selector(".card[data-id=e1][data-state=ready]")
        os.kill(cluster.pid_of("e1"), signal.SIGKILL)
        page.wait_for_selector(".card[data-id=e1]:is([data-state=lost], [data-state=gone], [data-state=missing])")
        assert page.get_attribute(".card[data-id=e0]", "data-state") == "ready"
        _give(page, "sign.png", "image/png", picture)
        page.wait_for_selector("#attached img")
        assert _ask(page) == text  # by the other encoder
        _shot(page, "page-dark")
        page.wait_for_selector(".card[data-id=e1][data-state=ready] .new", timeout=60_000)
        assert page.inner_text(".card[data-id=e1] .new") == "started again"


def test_a_key_is_asked_for_kept_for_the_tab_and_forgotten(browser: Browser, listening: Serving) -> None:
    with browser.page(listening.base_url, expected=LOCKED) as page:
        page.wait_for_selector("#key-dialog[open]")
        assert page.query_selector(".card") is None
        page.fill("#key-field", "wrong")
        page.keyboard.press("Enter")
        _until(page, "document.getElementById('key-problem').textContent.includes('not one of this server')")
        page.fill("#key-field", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector(".card[data-id=e0]")
        page.reload()
        page.wait_for_selector(".card[data-id=e0]")
        page.click("#lock")
        page.wait_for_selector("#key-dialog[open]")
        page.keyboard.press("Escape")
        page.wait_for_selector("#status[data-state=locked]")
        page.click("#unlock")
        page.wait_for_selector("#key-dialog[open]")


def test_a_recording_from_the_microphone_is_transcribed(browser: Browser, listening: Serving) -> None:
    with browser.page(listening.base_url, expected=LOCKED) as page:
        page.fill("#key-field", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#record[aria-disabled=false]")
        assert page.get_attribute("#add-image", "aria-disabled") == "true"
        assert page.is_disabled("#system")
        page.click("#record")
        page.wait_for_selector("#record[aria-pressed=true]:not(:disabled)")
        page.evaluate("new Promise((resolve) => setTimeout(resolve, 1200))")  # of sound
        page.click("#record")
        page.wait_for_selector("#attached audio")
        assert "recording.wav" in page.inner_text("#attached")
        page.click("summary")
        page.fill("#max-tokens", "8")
        _ask(page, "")
        assert page.inner_text("article .problem") == ""
        page.wait_for_selector("#requests li.good")
        rows = page.eval_on_selector_all("#stages .row", "rows => rows.map((row) => row.getAttribute('aria-label'))")
        assert {"encode", "decode"} <= {row.split(" on ")[0] for row in rows}


def test_a_cluster_that_has_ended_is_said_to_give_no_answer(browser: Browser, cluster: Serving) -> None:
    with browser.page(cluster.base_url, expected=re.compile("ERR_|Failed to load")) as page:
        page.wait_for_selector(".card")
        cluster.interrupt()
        page.wait_for_selector("#status[data-state=lost]", timeout=60_000)
        assert "is the cluster still running?" in page.inner_text("#problem")
