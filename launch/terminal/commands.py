"""`triptych doctor | logs`: what a person asks of the machine and of a running cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from launch.cli.options import takes_settings
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
