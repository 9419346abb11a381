"""Pages of the documentation of which a part is written by a program, between two marks."""

from __future__ import annotations

from pathlib import Path


def write_between(path: Path, begin: str, end: str, written: str) -> None:
    """Replace what stands between the two marks of a page. Raises ValueError where it has none."""
    text = path.read_text()
    if begin not in text or end not in text:
        raise ValueError(f"{path} has no lines {begin} and {end} to write between")
    before, _, rest = text.partition(begin)
    path.write_text(f"{before}{begin}\n\n{written}\n\n{end}{rest.partition(end)[2]}")
