"""`triptych status | drain | switch`: the workers of a running cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from common.messages import WorkerRole
from launch.cli.options import ClusterPort, takes_settings
from launch.cluster.configure import Flags, load_settings

if TYPE_CHECKING:
    from launch.cli.members import Members

Id = Annotated[
    str, typer.Argument(metavar="ID", help="Of a worker, as `triptych status` shows it.", show_default=False)
]
AnyId = Annotated[str, typer.Argument(metavar="ID", help="Of a worker, or of a proxy.", show_default=False)]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=1, help="Longest wait for its requests to end.")]
REACHING = ("broker", "cluster", "cluster_key_file")


@takes_settings(*REACHING)
def status(
    flags: Flags,
    port: ClusterPort = None,
    json: Annotated[bool, typer.Option("--json", help="All that the registry says, as JSON.")] = False,
    handoffs: Annotated[bool, typer.Option("--handoffs", help="Times of the hops of the last handoffs.")] = False,
) -> None:
    """Show the workers of a running cluster: roles, load, who is draining.

    \b
    Examples:
      triptych status
      triptych status --broker redis://10.0.0.5:6379 --cluster staging --json

    Without --broker it is the cluster that `triptych serve` runs on this machine; --port tells those of one name apart.
    """
    _with_members(flags, port, lambda one: one.show_handoffs(typer.echo) if handoffs else one.show_status(as_json=json))


@takes_settings(*REACHING)
def drain(flags: Flags, instance_id: AnyId, port: ClusterPort = None, timeout: Timeout = 600.0) -> None:
    """Let a worker or a proxy finish what it has and leave the cluster; nothing new is sent to it.

    \b
    Examples:
      triptych drain e1
      triptych drain pd0 --broker redis://10.0.0.5:6379 --timeout 60

    Returns when it has left, or when a proxy has nothing under way. `serve` does not start a worker again.
    """
    _with_members(flags, port, lambda members: members.drain(instance_id, timeout, typer.echo))


@takes_settings(*REACHING)
def switch(
    flags: Flags,
    instance_id: Id,
    role: Annotated[WorkerRole, typer.Option(help="What it is to do from then on.")],
    port: ClusterPort = None,
    timeout: Timeout = 600.0,
) -> None:
    """Let a worker finish what it has and come back in another role, under the same id.

    \b
    Examples:
      triptych switch e1 --role prefill_decode
      triptych switch e1 --role encoder

    Returns when it is ready in the new role.
    """
    _with_members(flags, port, lambda members: members.switch(instance_id, role, timeout, typer.echo))


def _with_members(flags: Flags, port: int | None, action: Callable[[Members], Awaitable[None]]) -> None:
    import asyncio

    from launch.cli.members import Members
    from launch.cluster.local_registry import reach

    async def run() -> None:
        async with Members(reach(load_settings({**flags, "port": port}))) as members:
            await action(members)

    asyncio.run(run())
