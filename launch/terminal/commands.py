"""`triptych doctor | logs | chat | top`: what a person asks of the machine and of a running cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from launch.cli.options import Url, takes_settings
from launch.cluster.configure import Flags, load_settings

Level = Annotated[str, typer.Option(metavar="debug|info|warning|error", help="Least level of the lines.")]


@takes_settings("topology", "host", "port", "broker", "engine.device", "engine.dtype")
def doctor(
    flags: Flags,
    model: Annotated[
        str | None, typer.Argument(help="Hub id, folder, or bundled model.", show_default="signpost")
    ] = None,
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


@takes_settings("cluster", "port")
def logs(
    flags: Flags,
    instance: Annotated[str | None, typer.Argument(help="Such as e0 or proxy.", show_default="all")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines, until Ctrl-C.")] = False,
    level: Level = "debug",
) -> None:
    """Print the logs of the cluster that `triptych serve` runs on this machine, in order of time.

    \b
    Examples:
      triptych logs
      triptych logs e0 --follow
      triptych logs --level warning

    --port tells clusters of one name apart. What is logged at all is said at the start: `serve --log-level debug`.
    """
    from common.errors import invalid
    from launch.cluster.local_registry import find_local, given_port
    from launch.terminal.logs import LEVELS, show_logs

    if level not in LEVELS:
        raise invalid(f"level = {level!r}: should be {', '.join(LEVELS)}", "level")
    settings = load_settings(flags)
    entry = find_local(settings.cluster, given_port(settings))
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
