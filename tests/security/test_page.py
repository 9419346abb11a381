"""The pages about security name settings, options and paths that there are."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from common.config import Settings
from common.http.auth import CONTROL_PATHS
from launch.cli.app import app

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "security.md").read_text() + (ROOT / "SECURITY.md").read_text()


def test_settings_in_the_environment_exist():
    named = set(re.findall(r"TRIPTYCH_([A-Z_]+)", PAGE))
    assert len(named) > 4
    assert named <= {name.upper() for name in Settings.model_fields}


def test_options_exist():
    commands = get_command(app).commands.values()
    options = {option for command in commands for parameter in command.params for option in parameter.opts}
    named = set(re.findall(r"`(--[a-z-]+)", PAGE)) | set(re.findall(r" (--[a-z-]+)", PAGE))
    assert len(named) > 5
    assert named <= options


def test_control_paths_are_told():
    assert all(f"`{path}`" in PAGE for path in CONTROL_PATHS)
