"""`python -m tools.house.settings_page`: print docs/reference/settings.md, the page of all settings."""

from __future__ import annotations

from collections.abc import Iterator

from common.config import describe_settings

_HEAD = """\
# Settings

Written by `python -m tools.house.settings_page` from the fields of `common.config`: change them there.

Flags win over the environment, the environment over `triptych.toml` (in the working directory, or the file named by
`TRIPTYCH_CONFIG`), the file over the defaults. A dot in a name is a section of the file: `engine.dtype` is `dtype`
below `[engine]`. Sizes are `512MiB`, `2GiB` or a number of bytes, in all three. An unknown name is refused.

| name | flag | environment variable | default | meaning |
|---|---|---|---|---|
"""


def settings_page() -> str:
    """Return the page in Markdown, a row per setting."""
    return _HEAD + "".join(_rows())


def _rows() -> Iterator[str]:
    for setting in describe_settings():
        flag = f"`{setting.flag}`" if setting.panel else "MODEL" if setting.name == "model" else ""
        meaning = setting.meaning.replace("|", r"\|")
        yield f"| `{setting.name}` | {flag} | `{setting.variable}` | {setting.default} | {meaning} |\n"


if __name__ == "__main__":
    print(settings_page(), end="")
