"""Entries of running clusters, written by `triptych serve` for other commands of the same user: a file per cluster.

    $XDG_RUNTIME_DIR/triptych/<cluster>-<pid>.json        (the temporary folder's triptych-<uid>/ where that is not set)

An entry holds the cluster's key, so nobody else may read the file. `serve` keeps the file locked: the lock ends with
the process, and tells a living cluster from a dead one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
from pydantic import SecretStr

from common.config import Settings
from common.errors import TriptychError, invalid
from common.keys import ClusterKey


class LocalEntry(msgspec.Struct, frozen=True):
    """Addresses and key of a cluster on this machine."""

    cluster: str
    base_url: str
    broker: str
    cluster_key: str
    model: str
    logs: str = ""
    """Folder of the log files, `<instance>.log`."""

    def is_alive(self) -> bool:
        """Whether the cluster still runs."""
        return self in _living()


@contextlib.contextmanager
def announced(entry: LocalEntry) -> Iterator[None]:
    """Let other commands find the cluster for the length of a `with` block.

    Raises TriptychError("unavailable") where the folder belongs to somebody else, OSError where it cannot be written.
    """
    folder = _folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder)
    path = folder / f"{quote(entry.cluster, safe='')}-{os.getpid()}.json"
    descriptor, new = tempfile.mkstemp(dir=folder)  # readable by its owner alone
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, msgspec.json.encode(entry))
        os.replace(new, path)  # locked and whole from its first moment
        yield
    finally:
        for leftover in (path, Path(new)):
            leftover.unlink(missing_ok=True)
        os.close(descriptor)
        with contextlib.suppress(OSError):
            folder.rmdir()  # if it was the last one


def find_local(settings: Settings) -> LocalEntry:
    """Return the cluster of the name among this user's clusters on this machine; of several, that of the port.

    Raises TriptychError("invalid_request") where there is none, or more than one.
    """
    cluster = settings.cluster
    found = [entry for entry in _living() if entry.cluster == cluster]
    if len(found) > 1 and "port" in settings.model_fields_set:  # the default tells no cluster from another
        found = [entry for entry in found if entry.base_url.endswith(f":{settings.port}")] or found
    if len(found) == 1:
        return found[0]
    if found:
        urls = ", ".join(sorted(entry.base_url for entry in found))
        message = f"several clusters {cluster!r} run here ({urls}): give the --port of one, or start each with a "
        message += "--cluster of its own"
    else:
        message = f"no cluster {cluster!r} of yours runs on this machine: give --broker redis://host:6379, or start one"
        message += " with `triptych serve` (and wait until it is ready)"
    raise invalid(message, "cluster")


def local_url() -> str:
    """Return the URL of this user's only cluster on this machine; without any cluster, the URL of the default port.

    Raises TriptychError("invalid_request") where several run.
    """
    if len(urls := local_urls()) > 1:
        raise invalid(f"several clusters of yours run here: give --url, {' or '.join(urls)}")
    return urls[0]


def local_urls() -> list[str]:
    """Return the URLs of this user's clusters on this machine; without any, that of the default port."""
    return sorted(entry.base_url for entry in _living()) or ["http://127.0.0.1:8000"]


def reach(settings: Settings) -> Settings:
    """Return settings with a broker and the cluster's key: the given ones, or those of this machine's cluster of the
    name.

    A model that nobody has named becomes that cluster's. Raises as `find_local` does.
    """
    if settings.broker is not None:
        return settings
    entry = find_local(settings)
    update: dict[str, object] = {"broker": entry.broker}
    if ClusterKey.of(settings) is None and entry.cluster_key:
        update["cluster_key"] = SecretStr(entry.cluster_key)
    if "model" not in settings.model_fields_set:
        update["model"] = entry.model
    return settings.model_copy(update=update)


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "triptych" if runtime else Path(tempfile.gettempdir()) / f"triptych-{os.getuid()}"


def _check_owner(folder: Path) -> None:
    """Refuse a folder of another user: anybody can set a trap in the temporary folder."""
    status = folder.lstat()
    if not folder.is_dir() or folder.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise TriptychError("unavailable", f"{folder} is not a folder that belongs to this user alone: remove it")


def _living() -> Iterator[LocalEntry]:
    """Yield the entries of running clusters; remove the entries of dead clusters."""
    folder = _folder()
    if not folder.is_dir():
        return
    _check_owner(folder)
    for path in sorted(folder.glob("*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink()
            except BlockingIOError:
                yield msgspec.json.decode(file.read(), type=LocalEntry)
