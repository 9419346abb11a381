"""Triptych on Ray Serve: `serve run launch.ray:app model=signpost topology=2e1pd`, or `triptych serve MODEL --on ray`.

Each worker, each proxy and the broker is a replica of a deployment; Ray places, restarts and counts them. Requests pass
from Serve's ingress to a proxy, and from there by the project's own channels. Needs the extra `ray`.

Does not belong here: anything about one machine's processes (launch.cluster). May import all rooms but `launch.cli`.
"""

from launch.ray.app import app

__all__ = ["app"]
