"""`triptych doctor | logs | chat | top | bench`: what a person asks of the machine and of a running cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.cli.options import ClusterPort, ModelArgument, Url, takes_settings
from launch.cluster.configure import Flags, load_settings

Level = Literal["debug", "info", "warning", "error", "critical"]


@takes_settings("topology", "host", "port", "broker", "engine.device", "engine.dtype")
def doctor(
    flags: Flags,
    model: ModelArgument = None,
    json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
) -> None:
    """Look at machine, packages, GPU, ports, broker and model, and say what to do. Nothing is downloaded.

    \b
    Examples:
      triptych doctor
      triptych doctor ./my-model --topology 2e1pd --json

    Exit code 1 if something keeps a cluster from running.
    """
    settings = load_settings({"model": model, **flags})
    from launch.terminal.doctor import run_doctor

    raise typer.Exit(run_doctor(settings, as_json=json))


@takes_settings("cluster")
def logs(
    flags: Flags,
    instance: Annotated[str | None, typer.Argument(help="Such as e0 or proxy.", show_default="all")] = None,
    port: ClusterPort = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines, until Ctrl-C.")] = False,
    level: Annotated[Level, typer.Option(help="Least level of the lines.")] = "debug",
) -> None:
    """Print the logs of the cluster that `triptych serve` runs on this machine, in order of time.

    \b
    Examples:
      triptych logs
      triptych logs e0 --follow
      triptych logs --level warning

    --port tells clusters of one name apart. What is logged at all is said at the start: `serve --log-level debug`.
    """
    from launch.cluster.local_registry import find_local
    from launch.terminal.logs import show_logs

    entry = find_local(load_settings({**flags, "port": port}))
    raise typer.Exit(show_logs(entry, instance, level, entry.is_alive if follow else None))


def chat(
    url: Url = None,
    model: Annotated[str | None, typer.Option(help="Model name.", show_default="the first one served")] = None,
    system: Annotated[str, typer.Option(help="What the model is told first.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(min=0, max=2, help="0 is greedy.", show_default="the server's")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Longest wait for one answer.")] = 600.0,
) -> None:
    """Talk with a model: answers stream, /image PATH adds a picture, Ctrl-C stops an answer, Ctrl-D leaves.

    \b
    Examples:
      triptych chat
      triptych chat --system "Answer in one sentence." --temperature 0
      echo "Name three colours." | triptych chat

    On a pipe every line is a question, and nothing but answers is printed; exit code 1 if one failed.
    """
    from launch.cli.client import client_options
    from launch.terminal.chat import run_chat

    raise typer.Exit(run_chat(client_options(url, model, max_tokens, temperature, timeout), system))


def top(
    url: Url = None,
    every: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Time between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look, and end.")] = False,
) -> None:
    """Watch a cluster: instances with load and caches, queues, the last requests. Ctrl-C leaves.

    \b
    Examples:
      triptych top
      triptych top --url http://10.0.0.5:8000 --every 5
      triptych top --once | grep draining

    Where the output is no terminal it is one look.
    """
    import asyncio

    from launch.cli.client import client_options
    from launch.terminal.top import run_top

    try:
        raise typer.Exit(asyncio.run(run_top(client_options(url, None, 1, None, 10.0), every, once=once)))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def bench(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Pictures and audio files, in turns.", exists=True, dir_okay=False)
    ] = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to ask.")] = "",
    url: Url = None,
    model: Annotated[str | None, typer.Option(help="Model name.", show_default="the first one served")] = None,
    concurrency: Annotated[
        str, typer.Option(metavar="N,…", help="Closed loop: requests in flight, a run each.", show_default="1")
    ] = "",
    rate: Annotated[str, typer.Option(metavar="R,…", help="Open loop: new requests per second, a run each.")] = "",
    constant: Annotated[bool, typer.Option("--constant", help="Equal gaps, not Poisson arrivals.")] = False,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="Requests of a run.")] = 100,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before, which do not count.")] = 4,
    together: Annotated[bool, typer.Option("--together", help="All pictures in one request.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="No two requests alike, so that no cache helps.")] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals and fresh files.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    extra: Annotated[str, typer.Option(metavar="JSON", help="Further fields of the requests.")] = "",
    goodput: Annotated[
        str, typer.Option(metavar="NAME:MS …", help="Objectives that good requests meet, as AIPerf has them.")
    ] = "",
    export: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw latencies by level of load.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Longest wait for one answer.")] = 600.0,
) -> None:
    """Measure any server of OpenAI's API: TTFT, inter-token latency, request latency, throughput, goodput.

    \b
    Examples:
      triptych bench -p "Name three colours." --concurrency 1,8,32 --extra '{"ignore_eos": true}'
      triptych bench samples/sign.png -p "What does the sign say?" --fresh --rate 2,4 --plot latency.svg
      triptych bench samples/speech.flac --fresh --concurrency 8 --json speech.json
      triptych bench -p "Hi." --rate 5 --goodput "time_to_first_token:500 inter_token_latency:50"

    Metrics have AIPerf's definitions. Exit code 1 if any request failed.
    """
    from launch.bench.figures import parse_objectives
    from launch.bench.run import BenchPlan, parse_extra, parse_levels, run_bench
    from launch.cli.client import client_options
    from launch.cli.request import make_jobs

    levels = parse_levels(concurrency, rate, constant=constant)
    plan = BenchPlan(levels, requests, warm_up, fresh, seed, parse_objectives(goodput), export, plot)
    options = replace(client_options(url, model, max_tokens, temperature, timeout), extra=parse_extra(extra))
    raise typer.Exit(run_bench(make_jobs(files or [], prompt, together=together), options, plan))
