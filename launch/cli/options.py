"""Settings as command-line options: flags, metavars and help come from the fields of `common.config`.

An option that is not given is None: then environment and file count.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_origin, get_type_hints

import typer

from launch.cluster.configure import Flags

if TYPE_CHECKING:
    from common.config import SettingInfo

ModelArgument = Annotated[str | None, typer.Argument(help="Hub id, folder, or bundled model.", show_default="signpost")]
ClusterPort = Annotated[
    int | None, typer.Option(metavar="PORT", help="Of the API: tells clusters of one name on this machine apart.")
]
Url = Annotated[
    str | None,
    typer.Option(help="URL of the API, without /v1.", show_default="the cluster that runs here, or port 8000"),
]


def takes_settings(*wanted: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds options for settings to a command, passed on in the argument `flags`.

    `wanted` are names of settings (`broker`, `engine.dtype`) and of panels with all their settings (`Keys`).
    """
    return lambda command: SettingsCommand(command, wanted)


class SettingsCommand:
    """A command with options for settings, derived on typer's request: pydantic is slow to import."""

    def __init__(self, command: Callable[..., None], wanted: tuple[str, ...]) -> None:
        self._command = command
        self._wanted = wanted
        self.__name__, self.__doc__ = command.__name__, command.__doc__

    def __call__(self, **given: Any) -> None:
        values = {setting.name: given.pop(setting.parameter) for setting in self._settings()}
        flags: Flags = {name: None if value == [] else value for name, value in values.items()}
        self._command(flags=flags, **given)

    def __getattr__(self, name: str) -> Any:
        if name == "__signature__":
            return inspect.Signature(self._parameters())
        if name == "__annotations__":
            return {parameter.name: parameter.annotation for parameter in self._parameters()}
        raise AttributeError(name)

    def _parameters(self) -> list[inspect.Parameter]:
        hints = get_type_hints(self._command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(self._command).parameters.items()
            if name != "flags"
        ]
        added = [
            inspect.Parameter(one.parameter, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(one))
            for one in self._settings()
        ]
        return [*own, *added]

    def _settings(self) -> list[SettingInfo]:
        from common.config import describe_settings

        return [one for one in describe_settings() if one.panel and {one.name, one.panel} & set(self._wanted)]


def _option(setting: SettingInfo) -> Any:
    """Return the annotation of an option. `load_settings` checks all values together."""
    kind: Any = setting.kind if setting.kind in (bool, int, float, Path) else str
    if get_origin(setting.kind) is tuple:
        kind = list[str]
    # A switch that is off by default can only be turned on; one that depends on the machine, both.
    names = [setting.flag] if kind is bool and setting.default == "no" else []
    option = typer.Option(
        *names,
        help=setting.meaning.replace("[", r"\["),
        show_default=setting.default,
        rich_help_panel=setting.panel,
        metavar=setting.metavar or None,
    )
    return Annotated[kind | None, option]
