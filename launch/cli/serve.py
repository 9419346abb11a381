"""`triptych serve`: a cluster in the foreground, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO, cast

from rich.console import Console
from rich.markup import escape

from common.config import Settings
from common.errors import TriptychError
from common.http.auth import serves_anybody
from common.keys import ClusterKey
from common.model_info import hub_folder, is_hub_id
from common.process import memory_upkeep
from common.process.end_signals import on_end_signal
from launch.cli.console import ConsoleReporter, NonblockingStream, make_console
from launch.cluster.children import adopt_orphans
from launch.cluster.local_registry import LocalEntry, announced
from launch.cluster.plan import Plan, make_plan
from launch.cluster.supervisor import Supervisor

_QUESTIONS = {
    "image": 'samples/sign.png --prompt "What does the sign say?"',
    "audio": "samples/speech.flac",
    "text": '--prompt "one thousand two hundred four"',
    None: '--prompt "Name three colours."',
}
_OPEN_PORT = "warning: anybody who reaches this port is served: give --api-key-file, see docs/how-to/security.md"


def serve(settings: Settings, start_timeout_s: float) -> int:
    """Run a cluster until SIGINT or SIGTERM; return 0 after a requested stop.

    Raises KeyboardInterrupt for one before anything started, and TriptychError where it cannot start, or cannot go on.
    """
    with _stdout() as out:
        console = make_console(out)
        if is_hub_id(settings.model) and hub_folder(settings.model) is None:
            console.print(f"getting {settings.model} from the hub …", highlight=False, markup=False)
        try:
            plan = make_plan(settings)
        except KeyboardInterrupt:
            console.print(f"stopped while looking up the model {settings.model}", style="dim", highlight=False)
            raise
        console.print(_announce(plan), highlight=False)
        if serves_anybody(plan.settings):
            console.print(_OPEN_PORT, style="yellow", highlight=False, soft_wrap=True)
        adopt_orphans()
        return asyncio.run(_serve(plan, console, start_timeout_s))


@contextlib.contextmanager
def _stdout() -> Iterator[TextIO | None]:
    """Yield an output stream that a cluster survives: the reader may go away, and the disk may be full."""
    if sys.stdout is None or sys.stdout.closed:
        with open(os.devnull, "w") as nowhere:
            yield nowhere
        return
    try:
        stream = NonblockingStream(sys.stdout)
    except io.UnsupportedOperation:  # it is no file
        yield None
        return
    with contextlib.closing(stream):
        yield cast(TextIO, stream)


def _announce(plan: Plan) -> str:
    name, threads = escape(", ".join(plan.settings.served_model_name or ())), plan.threads()
    roles = sorted({role for _, role in plan.topology.workers()})
    shares = ", ".join(f"{threads[role]} for each {role}" for role in roles)
    why = f" ({plan.reason})" if plan.reason else ""
    return f"[bold]{name}[/] ({plan.info.architecture}) as [bold]{plan.topology}[/]{why}; CPU threads: {shares}"


def _example(plan: Plan) -> str:
    """Return a command with a question that the cluster's model can answer."""
    files = "triptych samples && " if plan.info.media_kind in ("image", "audio") else ""
    return f"{files}triptych request {_QUESTIONS[plan.info.media_kind]} --url {plan.base_url}"


async def _serve(plan: Plan, console: Console, start_timeout_s: float) -> int:
    supervisor = Supervisor(plan, ConsoleReporter(console, str(plan.topology)), start_timeout_s)
    work = asyncio.ensure_future(_start_and_watch(supervisor, console))
    asked_to_stop = asyncio.Event()

    def on_signal() -> None:
        """Cancel the work on the first signal, which stops the cluster; on the second, kill all processes left."""
        asked_to_stop.set()
        if supervisor.stopping:
            supervisor.kill_now()
        else:
            work.cancel()

    on_end_signal(on_signal)
    try:
        await work
    except asyncio.CancelledError:
        if not asked_to_stop.is_set():
            raise
        if not supervisor.instances:
            console.print("stopped while waiting for the broker", style="dim", highlight=False)
    return 0


async def _start_and_watch(supervisor: Supervisor, console: Console) -> None:
    await supervisor.start()
    memory_upkeep.begin()
    try:
        plan, base_url = supervisor.plan, supervisor.plan.base_url
        names = escape(", ".join(plan.settings.served_model_name or ()))
        console.print(f"\n[bold]{names}[/] is served", highlight=False)
        console.print(f"OpenAI API at [bold]{base_url}/v1[/] · page at [bold]{base_url}[/]", highlight=False)
        console.print("Ctrl-C stops it · try:", highlight=False)
        console.print(f"  {_example(plan)}", highlight=False, markup=False, soft_wrap=True)
        with contextlib.ExitStack() as stack:
            try:  # the cluster runs even where other commands cannot find it
                stack.enter_context(announced(_entry(supervisor)))
            except (OSError, TriptychError) as error:
                text = f"other commands cannot find this cluster by its name: {escape(str(error))}"
                console.print(text, style="yellow")
            await supervisor.watch()
    finally:
        await supervisor.stop()


def _entry(supervisor: Supervisor) -> LocalEntry:
    """Return the entry by which `triptych status` and similar commands find this cluster by name."""
    settings, key = supervisor.plan.settings, ClusterKey.of(supervisor.plan.settings)
    assert supervisor.broker_url is not None
    return LocalEntry(
        cluster=settings.cluster,
        base_url=supervisor.plan.base_url,
        broker=supervisor.broker_url,
        cluster_key="" if key is None else key.reveal(),
        model=settings.model,
        logs=str(supervisor.logs or ""),
    )
