"""From flags to settings, from settings to the environment of a child process, errors in a single line."""

from __future__ import annotations

import os
from pathlib import Path
from tomllib import TOMLDecodeError
from typing import TYPE_CHECKING, Any, Final

from common.errors import closest, invalid
from common.process import openmp

if TYPE_CHECKING:
    from common.config import Settings

Flags = dict[str, Any]
"""Setting names (nested ones with a dot, such as `engine.device`) to values; None means not given."""

_WORKERS: Final = ("ENCODER", "PREFILL", "DECODE", "PREFILL_DECODE")
_NO_SETTINGS: Final = {
    *("CONFIG", "DEPARTURE_NOTE", "START_PHASE", "GPU_MODELS"),
    *("BROKER_PASSWORD", "CUDA_ARCHS", "MODELS", "PUBLISH", "START_PERIOD", "TAG"),
    *(worker + suffix for worker in _WORKERS for suffix in ("S", "_GPU", "_MEMORY_FRACTION")),
}
"""TRIPTYCH_ variables for others: the place of triptych.toml, the supervisor's note, the Compose files, the tests."""


def load_settings(flags: Flags) -> Settings:
    """Return settings from flags over environment over file over defaults.

    Raises TriptychError("invalid_request") naming each wrong or unknown setting, and its value.
    """
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from common.config import DEFAULT_FILE, ENV_PREFIX, Settings, explain

    _check_variables()
    given: dict[str, Any] = {}
    for name, value in flags.items():
        section, _, inner = name.rpartition(".")
        if value is not None:
            (given.setdefault(section, {}) if section else given)[inner] = value
    try:
        return Settings(**given)
    except ValidationError as error:
        raise invalid(explain(error, Settings, flags)) from error
    except (TOMLDecodeError, UnicodeDecodeError) as error:
        file = os.environ.get(f"{ENV_PREFIX}CONFIG") or DEFAULT_FILE
        raise invalid(f"cannot read the configuration {Path(file).absolute()}: {error}") from error
    except (SettingsError, ValueError, OSError) as error:  # unreadable JSON in the environment, TOML in the file
        raise invalid(f"cannot read the configuration: {error}") from error


def child_environment(settings: Settings, threads: int) -> dict[str, str]:
    """Return the environment of a child process: exactly these settings, whatever the parent's environment or file
    says.

    `threads` is the CPU share of its numeric libraries.
    """
    from common.config import ENV_PREFIX

    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    values = settings.model_dump(exclude_none=True)
    engine = values.pop("engine")
    environment.update({ENV_PREFIX + name.upper(): _text(value) for name, value in values.items()})
    environment.update({f"{ENV_PREFIX}ENGINE__{name.upper()}": _text(value) for name, value in engine.items()})
    environment[ENV_PREFIX + "CONFIG"] = os.devnull
    environment["OMP_NUM_THREADS"] = str(threads)
    openmp.set_defaults(environment)
    environment["TOKENIZERS_PARALLELISM"] = "false"
    # Of a killed worker, Python's helper would say what it tidies up, as the worker's last words.
    given = environment.get("PYTHONWARNINGS")
    environment["PYTHONWARNINGS"] = ",".join(filter(None, (given, "ignore:resource_tracker")))
    return environment


def _text(value: Any) -> str:
    from pydantic import SecretStr

    if isinstance(value, SecretStr):
        return value.get_secret_value()  # only the same user can read a process's environment
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_variables() -> None:
    """Refuse misspelt variables and a named file that is none: pydantic ignores both."""
    from common.config import ENV_PREFIX, describe_settings

    known = {setting.variable for setting in describe_settings()} | {f"{ENV_PREFIX}ENGINE"}
    given = (name.upper() for name in os.environ if name.upper().startswith(ENV_PREFIX))
    wrong = [name for name in given if name not in known and name.removeprefix(ENV_PREFIX) not in _NO_SETTINGS]
    if wrong:
        found = (f"unknown setting {name!r} in the environment{closest(name, known)}" for name in sorted(wrong))
        raise invalid("; ".join(found))
    file = os.environ.get(f"{ENV_PREFIX}CONFIG", "")
    if file not in ("", os.devnull) and not Path(file).is_file():
        raise invalid(f"TRIPTYCH_CONFIG names {file!r}, which is not a file")
