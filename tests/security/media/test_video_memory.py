"""A long video costs the proxy, its helper and an encoder bounded memory beside what they hold anyway."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import openai
import pytest

from common.config import EngineConfig, Settings
from launch.cluster.local_cluster import LocalCluster
from tests.engine.models.dense import edit_json
from tests.tiny_models import make_qwen2_5_vl
from tests.video_files import moving, video_file
from tools.soak.memory import children_of

MB = 10**6
LIMIT_BYTES = 500 * MB
NUM_FRAMES, WIDTH, HEIGHT = 768, 1920, 1080
INTERVAL_S = 0.02


@dataclass
class PssRange:
    """The memory of processes and their children, sampled in a thread; pages shared by several count once in all.

    The growth is told from the least of all samples: what earlier work has left may go back to the system meanwhile.
    """

    parents: dict[str, int]
    samples: list[dict[str, int]] = field(default_factory=list)

    def now(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, pid in self.parents.items():
            found[name] = pss_of([pid])
            found[f"{name}, children"] = pss_of(children_of(pid))
        return {**found, "all": sum(found.values())}

    @contextmanager
    def sampling(self) -> Iterator[None]:
        done = threading.Event()

        def sample() -> None:
            while not done.wait(INTERVAL_S):
                self.samples.append(self.now())

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def growth(self) -> dict[str, int]:
        """By name; of parts, each at its own time, the sum is larger than that of all."""
        return {
            name: max(one[name] for one in self.samples) - min(one[name] for one in self.samples)
            for name in self.samples[0]
        }


def pss_of(pids: Iterable[int]) -> int:
    """Bytes of memory, of shared pages each process's part; of processes that have ended none."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


def long_video() -> bytes:
    """768 frames of 1080p at two per second, all of them seen, with noise in a band that moves."""
    noise = np.random.default_rng(0).integers(0, 256, (64, WIDTH, 3), np.uint8)
    base, buffer = moving(1, WIDTH, HEIGHT)[0], io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("libx264", rate=2, options={"preset": "ultrafast", "crf": "30", "g": "30"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(NUM_FRAMES):
            pixels = np.roll(base, 7 * number, axis=1)
            top = number % (HEIGHT - len(noise))
            pixels[top : top + len(noise)] = noise
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        file.mux(stream.encode(None))
    return buffer.getvalue()


@pytest.mark.cluster
@pytest.mark.slow
def test_a_video_of_768_frames_of_1080p_stays_within_bounds(tmp_path: Path, record_property: Any) -> None:
    folder = make_qwen2_5_vl(tmp_path / "model", num_hidden_layers=1, max_position_embeddings=2**17)
    pixels = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16384}  # as Qwen2.5-VL is published
    edit_json(folder / "preprocessor_config.json", lambda json: {**json, **pixels})
    # One piece per batch, as where outputs are as wide as those of a model of real size.
    sizes = {"kv_cache_bytes": 256 * MB, "encoder_cache_bytes": 64 * MB, "encoder_batch_bytes": MB}
    engine = EngineConfig(num_threads=1, **sizes)  # type: ignore[arg-type]
    settings = Settings(model=str(folder), port=0, max_video_frames=NUM_FRAMES, log_level="warning", engine=engine)
    video = long_video()
    with LocalCluster(settings, "1e1pd") as cluster:
        ask(cluster, video_file(moving(8, WIDTH, HEIGHT), 2))  # libraries, the helper and pools are there
        pids = {one.role: one.pid for one in cluster.instances.values() if one.role in ("proxy", "encoder")}
        memory = PssRange({role: pid for role, pid in pids.items() if pid is not None})
        with memory.sampling():
            num_tokens = ask(cluster, video)
    growth = memory.growth()
    for name, size in growth.items():
        record_property(name, size)
        print(f"{name}: {size / MB:.0f} MB")
    print(f"{num_tokens} tokens, a file of {len(video) / MB:.1f} MB")
    assert num_tokens > 100_000
    assert growth["all"] < LIMIT_BYTES, growth


def ask(cluster: LocalCluster, video: bytes) -> int:
    """Ask about a video; the number of tokens of the prompt."""
    url = f"data:video/mp4;base64,{base64.b64encode(video).decode()}"
    content: Any = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "What moves?"}]
    local = openai.DefaultHttpxClient(trust_env=False)
    client = openai.OpenAI(
        base_url=f"{cluster.base_url}/v1", api_key="none", max_retries=0, timeout=500, http_client=local
    )
    asked: Any = [{"role": "user", "content": content}]
    with client:
        answer = client.chat.completions.create(model="model", messages=asked, max_tokens=1)
    assert answer.usage is not None
    return answer.usage.prompt_tokens
