"""The command line: `triptych serve | request | status | …`. Heavy imports wait inside the commands."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn, cast

import typer

from common.errors import TriptychError, how_to_install, invalid
from common.messages import WorkerRole
from launch.cli import members_commands
from launch.cli.options import ModelArgument, Url, takes_settings
from launch.cluster.configure import Flags, load_settings
from launch.terminal import commands

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="triptych",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Platform = Literal["here", "ray"]
Model = Annotated[str | None, typer.Option(help="Hub id, folder, or bundled model.", show_default="signpost")]
FollowParent = Annotated[bool, typer.Option("--follow-parent", hidden=True)]
OF_A_PROCESS = ("broker", "cluster", "instance_id", "host", "advertise_host", "Keys", "Logs")
"""Settings of a process that is run alone: a worker, or the proxy."""


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"triptych {version('triptych')}")
        raise typer.Exit


@app.callback()
def triptych(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve multimodal and encoder-decoder models with encoding, prefill and decoding as separate processes.

    \b
    Start here:
      triptych demo
      triptych samples
      triptych serve signpost
      triptych request samples/sign.png --prompt "What does the sign say?"

    Every setting is an environment variable (TRIPTYCH_PORT=9000) or a line of triptych.toml (port = 9000), the common
    ones are flags (--port 9000); flags win over the environment, the environment over the file.
    """


@app.command()
@takes_settings("topology", "host", "port", "broker", "cluster", "Keys", "API", "Engine", "Logs")
def serve(
    flags: Flags,
    model: ModelArgument = None,
    start_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.1, help="Longest wait until all is ready; not for Ray.", show_default="300"
        ),
    ] = None,
    on: Annotated[Platform, typer.Option(help="Where the workers run: here, or as replicas of Ray Serve.")] = "here",
) -> None:
    """Start a whole cluster on this machine: broker, encoders, prefill and decode workers and the OpenAI API.

    \b
    Examples:
      triptych serve signpost
      triptych serve ./whisper-tiny --topology 2e1pd --port 9000
      triptych serve signpost --topology 1e1p1d
      triptych serve Qwen/Qwen2.5-VL-3B-Instruct --device cuda --kv-cache-bytes 8GiB
      triptych serve ./model --broker redis://10.0.0.5:6379 --cluster staging
      triptych serve signpost --topology 2e1pd --on ray

    Ctrl-C stops everything. A worker that dies is reported and started again. `triptych status`, `drain` and `switch`
    look after a cluster that runs.
    """
    settings = load_settings({"model": model, **flags})
    if on == "ray":
        if start_timeout is not None:
            raise invalid("--start-timeout does not count with --on ray: leave it out", "start_timeout")
        try:
            from launch.ray.serve import serve as run_on_ray
        except ModuleNotFoundError as error:
            raise invalid(f"--on ray needs Ray: {how_to_install('ray')} ({error})") from error
        raise typer.Exit(run_on_ray(settings))
    from launch.cli.serve import serve as run
    from launch.cluster.supervisor import START_TIMEOUT_S

    raise typer.Exit(run(settings, start_timeout or START_TIMEOUT_S))


@app.command()
@takes_settings(*OF_A_PROCESS, "Engine")
def worker(
    flags: Flags,
    role: Annotated[WorkerRole, typer.Option(help="What this process does.")],
    model: Model = None,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, metavar="PORT", help="Port of /health, /ready and /metrics; 0 picks a free one."
        ),
    ] = 0,
    follow_parent: FollowParent = False,
) -> None:
    """Run one worker process, as a container or another host runs it.

    \b
    Examples:
      triptych worker --role encoder --model ./model --broker redis://10.0.0.5:6379 --host 0.0.0.0 --port 8001
      triptych worker --role prefill_decode --model signpost --broker redis://127.0.0.1:6379
      triptych worker --role prefill --model ./model --broker redis://10.0.0.5:6379     with --role decode elsewhere

    Proxies and other workers find it through the broker, and send it work at once. Without --broker it joins the
    cluster that `triptych serve` runs on this machine.
    """
    settings = load_settings({"model": model, "port": port, **flags})
    from launch.cluster.local_registry import reach

    settings = reach(settings)
    _follow_parent(follow_parent)
    from services.worker import run

    _exit(run(settings, role))


@app.command()
@takes_settings(*OF_A_PROCESS, "port", "API", "engine.max_model_len", "lora_modules", "handoff_timeout_s")
def proxy(flags: Flags, model: Model = None, follow_parent: FollowParent = False) -> None:
    """Run the OpenAI API alone, as a container or another host runs it. Needs no torch.

    \b
    Example:
      triptych proxy --model signpost --broker redis://10.0.0.5:6379 --host 0.0.0.0 --port 8000
    """
    settings = load_settings({"model": model, **flags})
    if settings.broker is None:
        message = "no broker: give --broker redis://host:6379, or start a whole cluster with `triptych serve`"
        raise invalid(message, "broker")
    _follow_parent(follow_parent)
    from proxy.app import run

    _exit(run(settings))


@app.command()
def broker(
    host: Annotated[str, typer.Option(help="Address to listen on, for both ports.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Of the Redis protocol.")] = 6379,
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Of /health, /ready and /metrics.")
    ] = 6380,
    password_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the password; without one, TRIPTYCH_BROKER_PASSWORD.", exists=True, dir_okay=False
        ),
    ] = None,
) -> None:
    """Run the broker alone, as a supervisor or another host runs it. `triptych serve` starts its own.

    \b
    Examples:
      triptych broker
      triptych broker --host 0.0.0.0 --password-file /etc/triptych/broker-password
      TRIPTYCH_BROKER=redis://:PASSWORD@10.0.0.5:6379 triptych worker --role encoder --model ./model

    Nothing is saved: the broker holds only what requests in flight need. Port 0 picks a free one. SIGTERM or Ctrl-C
    stops the broker; where the server ends by itself, the exit code is 1.
    """
    password = password_file.read_text().strip() if password_file else os.environ.get("TRIPTYCH_BROKER_PASSWORD", "")
    from launch.cli.broker import run_broker

    raise typer.Exit(run_broker(host, port, http_port, password))


@app.command()
def request(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Pictures and audio files: one request each.", exists=True, dir_okay=False, readable=True),
    ] = None,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to ask (or to tell a transcription).")] = "",
    url: Url = None,
    model: Annotated[str | None, typer.Option(help="Model name.", show_default="the first one served")] = None,
    parallel: Annotated[int, typer.Option(min=1, max=1024, help="Requests in flight.")] = 8,
    repeat: Annotated[int, typer.Option(min=1, help="Send every request this many times.")] = 1,
    stream: Annotated[bool, typer.Option("--stream", help="Print the tokens as they come.")] = False,
    together: Annotated[bool, typer.Option("--together", help="All pictures in one request.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.0,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Longest wait for one answer.")] = 600.0,
) -> None:
    """Send requests in parallel, print the answers, and how long they took.

    \b
    Examples:
      triptych request --prompt "Name three colours."
      triptych request a.png b.png --prompt "What does the sign say?" --parallel 2
      triptych request a.png b.png --together --prompt "What does the second sign say?"
      triptych request speech.flac
      triptych request a.png -p "Count the circles." --repeat 100 --parallel 16

    The API key, if the server wants one, comes from TRIPTYCH_API_KEY. Exit code 1 if any request failed.
    """
    from launch.cli.client import client_options
    from launch.cli.request import run_requests

    options = client_options(url, model, max_tokens, temperature, timeout)
    raise typer.Exit(
        run_requests(files or [], prompt, options, parallel=parallel, repeat=repeat, live=stream, together=together)
    )


@app.command()
@takes_settings("topology", "engine.device", "engine.dtype", "engine.num_threads")
def demo(
    flags: Flags,
    pictures: Annotated[int, typer.Option(min=1, max=32, help="How many pictures.")] = 6,
    seed: Annotated[int, typer.Option(help="Other seeds choose other pictures.")] = 7,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the pictures, with questions and answers.")] = False,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where --keep leaves them.")] = Path("demo-pictures"),
) -> None:
    """Start a cluster with signpost, ask it about pictures new to it, show what happened where, stop; then ask
    numerals for numbers and dates.

    \b
    Examples:
      triptych demo
      triptych demo --keep
      triptych demo --topology 2e1pd --pictures 12 --seed 1 --keep ./pictures
    """
    settings = load_settings({**flags, "model": "signpost", "port": 0})
    from launch.demo.run import run_demo

    raise typer.Exit(run_demo(settings, pictures, seed, folder if keep else None))


@app.command()
def samples(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where they go.")] = Path("samples"),
) -> None:
    """Write a picture, a recording and a text with known answers, and show how to ask about them.

    \b
    Examples:
      triptych samples
      triptych samples /tmp/triptych-samples
    """
    from launch.cluster.local_registry import local_urls
    from launch.demo.samples import write_samples

    urls = local_urls()
    typer.echo(write_samples(folder, urls[0]))
    if len(urls) > 1:
        typer.echo(f"Several clusters of yours run here: give `triptych request` a --url, {' or '.join(urls)}")


for _command in (
    *(members_commands.status, members_commands.drain, members_commands.switch),
    *(commands.doctor, commands.logs, commands.chat, commands.top, commands.bench),
):
    app.command()(_command)


def _follow_parent(wanted: bool) -> None:
    if wanted:
        from launch.cluster.children import follow_parent

        follow_parent()


def _exit(code: int) -> NoReturn:
    """End a process with everything closed, at once: the interpreter takes seconds to shut down with torch loaded."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Run the command line and exit: 0 well, 1 failed, 2 wrong usage, 130 interrupted. An error takes a single line."""
    try:
        code = app(standalone_mode=False)
    except typer.TyperException as error:
        _fail(" ".join(error.format_message().split()), error.exit_code)
    except TriptychError as error:
        usage = error.info.code in ("invalid_request", "model_not_found")
        _fail(error.info.message, EXIT_USAGE if usage else EXIT_FAILURE)
    except PermissionError as error:
        _fail(str(error), EXIT_USAGE)
    except KeyboardInterrupt:  # while the command is still put together
        _fail("", EXIT_INTERRUPTED)
    sys.exit(cast(int, code or 0))


def _fail(message: str, code: int) -> None:
    if message:  # none where the help was printed instead
        typer.secho("error: ", fg="red", bold=True, nl=False, err=True)
        typer.echo(message, err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
