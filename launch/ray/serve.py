"""`triptych serve MODEL --on ray`: the application on a Ray cluster, until Ctrl-C."""

from __future__ import annotations

import signal
import time
from typing import Any, cast

import ray
from ray import serve as ray_serve
from rich.console import Console

from common.config import Settings
from launch.ray.app import application_of


def serve(settings: Settings) -> int:
    """Run the application on the cluster of RAY_ADDRESS, or of this machine; return 0 after Ctrl-C or SIGTERM.

    A Ray of its own is started where none runs. Raises TriptychError for a model or topology that is none, and
    RuntimeError where Ray cannot start the application.
    """
    console, name = Console(highlight=False), settings.cluster
    made = application_of(settings)
    cast(Any, ray).init(log_to_driver=False, namespace="serve")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C; Ray has set one of its own
    nodes = sum(node["Alive"] for node in cast(Any, ray).nodes())
    console.print(f"starting {settings.model} on Ray, {nodes} node{'s' if nodes > 1 else ''}; workers load the model …")
    ray_serve.start(http_options={"host": settings.host, "port": settings.port})
    try:
        ray_serve.run(made, name=name, route_prefix="/")
        console.print(f"ready: http://{settings.host}:{settings.port}/v1 (application {name}; Ctrl-C ends it)")
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        console.print("stopping: workers finish what they have …")
        ray_serve.delete(name)
        return 0
