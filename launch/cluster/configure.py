"""Flags to settings, settings to the environment of a child process, and errors in one line."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from common.errors import TriptychError
from common.process import openmp

if TYPE_CHECKING:
    from pydantic import ValidationError

    from common.config import Settings

Flags = dict[str, Any]
"""Setting names (nested ones with a dot, such as `engine.device`) to values; None means not given."""

ENV_PREFIX = "TRIPTYCH_"
_SECRETS = ("api_key", "cluster_key", "broker")


def load_settings(flags: Flags) -> Settings:
    """Settings from flags over environment over file over defaults.

    Raises TriptychError("invalid_request") naming each wrong setting and its value.
    """
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from common.config import Settings

    given = _nest({name: value for name, value in flags.items() if value is not None})
    try:
        return Settings(**given)
    except ValidationError as error:
        raise TriptychError("invalid_request", _describe(error)) from error
    except (SettingsError, ValueError, OSError) as error:  # unreadable JSON in the environment, TOML in the file
        raise TriptychError("invalid_request", f"cannot read the configuration: {error}") from error


def child_environment(settings: Settings, threads: int) -> dict[str, str]:
    """The environment of a child process: exactly these settings, whatever the parent's environment or file says.

    `threads` is the CPU share of its numeric libraries.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    values = settings.model_dump(exclude_none=True)
    engine = values.pop("engine")
    environment.update({ENV_PREFIX + name.upper(): _text(value) for name, value in values.items()})
    environment.update({f"{ENV_PREFIX}ENGINE__{name.upper()}": _text(value) for name, value in engine.items()})
    environment[ENV_PREFIX + "CONFIG"] = os.devnull
    environment["OMP_NUM_THREADS"] = str(threads)
    openmp.set_defaults(environment)
    environment["TOKENIZERS_PARALLELISM"] = "false"
    return environment


def _text(value: Any) -> str:
    from pydantic import SecretStr

    if isinstance(value, SecretStr):
        return value.get_secret_value()  # only the same user can read a process's environment
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _nest(flags: Flags) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flags.items():
        *outer, inner = name.split(".")
        target = nested
        for part in outer:
            target = target.setdefault(part, {})
        target[inner] = value
    return nested


def _describe(error: ValidationError) -> str:
    """All that is wrong, in one line: name, value, rule."""
    found = []
    for detail in error.errors():
        name = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            found.append(f"{name} is not a setting")
        else:
            value = "(secret)" if name in _SECRETS else repr(detail["input"])
            found.append(f"{name} = {value}: {detail['msg'][0].lower()}{detail['msg'][1:]}")
    return "; ".join(found)
