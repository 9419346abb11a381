"""`python -m tools.bench.interference`: how much do images disturb the token streams of other clients?

Text streams in a closed loop, first alone, then beside clients that send one fresh image after the other. A figure is
the gap between two tokens of a stream (ITL), as the client sees it. The systems take turns within a repetition.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import numpy as np
import typer
from httpcore import Request
from PIL import Image

from common.config import EngineConfig, Settings
from common.model_info import BUNDLED
from common.process.ports import free_port
from launch.cluster.local_cluster import LocalCluster
from tools.bench.client import LoadClient, Outcome
from tools.bench.measure import emit
from tools.bench.report import markdown

FOLDER: Final = Path(__file__).resolve().parents[2] / ".cache" / "weights" / "interference"
LETTERS: Final = list(range(33, 83))
"""Tokens of one character each: every token is text at once, whatever the weights."""
IMAGE_TOKENS: Final = 8
"""Length of the answers about images."""


@dataclass
class Phase:
    """All turns of one system, alone or beside images."""

    seconds: float = 0.0
    texts: list[Outcome] = field(default_factory=list)
    images: list[Outcome] = field(default_factory=list)

    def gaps_ms(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        return 1e3 * np.sort(np.concatenate([outcome.gaps_s for outcome in self.texts]))

    def tokens_per_s(self) -> float:
        return sum(outcome.num_tokens for outcome in self.texts) / self.seconds

    def tokens_per_event(self) -> float:
        """Return 1 for a server that sends each token alone: else a gap is that of several tokens."""
        events = sum(len(outcome.gaps_s) + 1 for outcome in self.texts)
        return sum(outcome.num_tokens for outcome in self.texts) / events

    def cells(self) -> list[str]:
        p50, p90, p99, most = np.quantile(self.gaps_ms(), [0.5, 0.9, 0.99, 1.0])
        ttft_ms = 1e3 * float(np.median([outcome.ttft_s or 0 for outcome in self.texts]))
        times = f"{p50:.1f} / {p90:.1f} / {p99:.1f} / {most:.0f}"
        rates = [f"{self.tokens_per_s():.0f}", f"{self.tokens_per_event():.2f}"]
        return [times, f"{ttft_ms:.0f}", *rates, f"{len(self.images) / self.seconds:.2f}"]


async def run_turn(
    client: LoadClient, model: str, phase: Phase, seconds: float, streams: int, images: int, size: int, rate: float
) -> None:
    """Run so many streams beside so many clients with images of `size` pixels a side, for `seconds`.

    The images, made on threads, come at `rate` a second, or each as soon as the client's last one is answered.
    """
    began_s = time.perf_counter()
    ends_s = began_s + seconds

    async def repeat(content: Callable[[], Any], max_tokens: int, outcomes: list[Outcome], every_s: float) -> None:
        due_s = began_s
        while time.perf_counter() < ends_s:
            outcome = await client.ask(_request(client, model, await asyncio.to_thread(content), max_tokens))
            if outcome.status != 200:
                raise typer.BadParameter(f"the server answered {outcome.status}: {outcome.error}")
            outcomes.append(outcome)
            due_s += every_s  # what is due after a slow answer goes out at once
            await asyncio.sleep(min(due_s, ends_s) - time.perf_counter())

    loops = [repeat(_words, 64, phase.texts, 0) for _ in range(streams)]
    loops += [repeat(lambda: _image(size), IMAGE_TOKENS, phase.images, images / rate) for _ in range(images)]
    await asyncio.gather(*loops)
    phase.seconds += time.perf_counter() - began_s


def _words() -> str:
    return " ".join("".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(60))


def _image(size: int) -> list[dict[str, Any]]:
    """Return the content of a message with an image that nobody has seen."""
    pixels = np.frombuffer(random.randbytes(16 * 16 * 3), np.uint8).reshape(16, 16, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((size, size)).save(file, "JPEG", quality=90)
    url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]


def _request(client: LoadClient, model: str, content: Any, max_tokens: int) -> Request:
    messages = [{"role": "user", "content": content}]
    body = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "allowed_token_ids": LETTERS}
    return client.build("/v1/chat/completions", {"json": body})


def make_model(folder: Path) -> Path:
    """Save a model of random weights with the architecture of Qwen2.5-VL: 31 M parameters of vision, 24 M of text."""
    import torch
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    if (folder / "model.safetensors").exists():
        return folder
    signpost = BUNDLED / "signpost"
    shutil.copytree(signpost, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    config = json.loads((signpost / "config.json").read_text())
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 8}
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "max_position_embeddings": 4096}
    config["text_config"].update(**heads, **sizes, layer_types=["full_attention"] * 8)
    vision = {"depth": 8, "hidden_size": 512, "intermediate_size": 1408, "num_heads": 8, "out_hidden_size": 512}
    config["vision_config"].update(**vision, fullatt_block_indexes=[3, 7])
    (folder / "config.json").write_text(json.dumps(config))
    images = json.loads((signpost / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**images, "max_pixels": 1003520}))
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(AutoConfig.from_pretrained(folder)).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def interference(
    topology: Annotated[list[str] | None, typer.Option(help="Clusters to start, one after the other.")] = None,
    server: Annotated[list[str] | None, typer.Option(help="NAME=URL=MODEL of servers that run already.")] = None,
    vllm: Annotated[Path | None, typer.Option(help="vLLM's program, to be served with the same model.")] = None,
    model: Annotated[Path | None, typer.Option(help="Of the clusters, for one of random weights.")] = None,
    streams: Annotated[int, typer.Option(min=1)] = 4,
    images: Annotated[int, typer.Option(min=0, help="Clients that send images.")] = 2,
    images_per_s: Annotated[float, typer.Option(min=0.01, help="Of all clients; else one after the other.")] = math.inf,
    size: Annotated[int, typer.Option(min=28, help="Width and height of an image, in pixels.")] = 448,
    seconds: Annotated[float, typer.Option(help="Length of a turn, alone and beside images each.")] = 15.0,
    repetitions: Annotated[int, typer.Option(min=1)] = 2,
    plot: Annotated[Path | None, typer.Option(help="An SVG of the gaps (needs the extra `plot`).")] = None,
) -> None:
    """Measure the gaps between the tokens of text streams, alone and beside clients with images.

    `make interference VLLM=PROGRAM` gives the figures and the plot of the README.
    """
    folder = model or make_model(FOLDER)
    phases: dict[tuple[str, bool], Phase] = {}
    with ExitStack() as running:
        names = [*(server or ()), *([] if vllm is None else [_start_vllm(vllm, folder, running)])]
        names += topology or ([] if server else ["1e1pd", "1e1p1d"])
        for repetition, name in itertools.product(range(repetitions), names):
            emit(f"{name.partition('=')[0]}, turn {repetition + 1} of {repetitions}")
            with ExitStack() as stack:
                base_url, served = _server(name, folder, stack)
                client = LoadClient(base_url)
                with closing(asyncio.Runner()) as runner:
                    for beside in (False, True):
                        phase = phases.setdefault((name.partition("=")[0], beside), Phase())
                        clients = streams, images if beside else 0, size, images_per_s
                        runner.run(run_turn(client, served, phase, seconds, *clients))
                    runner.run(client.close())
    rows = [[name, "beside images" if beside else "alone", *phase.cells()] for (name, beside), phase in phases.items()]
    titles = ["system", "text", "ITL p50 / p90 / p99 / max, ms", "TTFT p50, ms"]
    titles += ["text tokens/s", "tokens per event", "images/s"]
    print(markdown(titles, rows))
    if plot is not None:
        _draw(phases, plot)


def _server(name: str, folder: Path, stack: ExitStack) -> tuple[str, str]:
    """Return the address of a system, and its name for the model; start a cluster where `name` is a topology."""
    if "=" in name:
        url, _, served = name.partition("=")[2].rpartition("=")
        return url.rstrip("/"), served
    config = EngineConfig(dtype="bfloat16")
    settings = Settings(model=str(folder), served_model_name=("vlm",), port=0, log_level="warning", engine=config)
    cluster = LocalCluster(settings, name)
    cluster.start()
    stack.callback(cluster.stop)
    return cluster.base_url, "vlm"


def _start_vllm(program: Path, folder: Path, stack: ExitStack) -> str:
    """Start vLLM and wait until it answers, which takes minutes on a CPU; return NAME=URL=MODEL."""
    port = free_port("127.0.0.1")
    options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048"]
    command = [str(program), "serve", str(folder), "--served-model-name", "vlm", *options]
    env = {"VLLM_CPU_KVCACHE_SPACE": "2", **os.environ}
    env.pop("OMP_WAIT_POLICY", None)  # the Makefile's, for our processes
    emit("vLLM starts")
    log = folder / "vllm.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=env)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    while True:
        with suppress(httpx.TransportError):
            if httpx.get(f"http://127.0.0.1:{port}/health").is_success:
                return f"vLLM=http://127.0.0.1:{port}=vlm"
        if process.poll() is not None:
            raise typer.BadParameter(f"{program} ended before it answered; {log} says why")
        time.sleep(0.5)


def _draw(phases: dict[tuple[str, bool], Phase], file: Path) -> None:
    """Draw which share of the gaps is longer than a time."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    colours = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(name for name, _ in phases))}
    for (name, beside), phase in phases.items():
        longer = np.geomspace(1, 5e-4, 300)
        gaps = np.quantile(phase.gaps_ms(), 1 - longer)
        label = f"{name}, beside images" if beside else f"{name}, text alone"
        axes.plot(gaps, longer, color=colours[name], linestyle="-" if beside else ":", label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(3, None),
        xlabel="gap between two tokens of a stream, ms",
        ylabel="share of longer gaps",
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7, loc="upper right")
    figure.savefig(file)


if __name__ == "__main__":
    typer.run(interference)
