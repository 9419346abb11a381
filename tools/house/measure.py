"""`python -m tools.house.measure`: sizes, names and prose of the repository, counted from its tracked files.

With --limits the exit status is 1 where a figure is over its limit.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import typer

PRODUCT: Final = ("common", "broker", "engine", "services", "proxy", "launch", "triptych")
PRONOUN: Final = re.compile(
    "it|its|itself|that|what|which|who|whom|whose|whoever|whatever|whichever|ones?|so|such|there|those|these|they|them|"
    "their|somebody|nobody|anybody|everybody|something|nothing|anything|everything|else"
)
RELATIVE: Final = re.compile("what|who|whoever|whatever|whichever|where|that")
LIMITS: Final[Mapping[str, float]] = {
    "product lines": 47_250,
    "tools lines": 8_000,
    "modules in a folder": 16,
    "class names used twice": 0,
    "pronouns, % of docstring words": 4.0,
    "docstrings that begin with a relative": 0,
    "README lines": 120,
    "longest function": 70,
    "files of a request": 104,
    "functions of a request": 520,
}
"""Ratchets: a limit falls with its figure, and rises only by a budget that was agreed before."""
ADVICE: Final[Mapping[str, str]] = {
    "product lines": "delete as many lines as you add",
    "tools lines": "delete as many lines as you add",
    "modules in a folder": "open a sub-folder for what belongs together, with an __init__.py that says what it holds",
    "class names used twice": "rename one of them",
    "pronouns, % of docstring words": "name the subject in the docstrings you have added",
    "docstrings that begin with a relative": "begin with a verb, or name the thing",
    "README lines": "move details to docs/",
    "longest function": "split the function named below",
    "files of a request": "do without another layer, or off the way of a request",
    "functions of a request": "do without another layer, or off the way of a request",
}
"""What to do about a figure over its limit."""
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED: Final = (ast.Module, ast.ClassDef, *_FUNCTIONS)


@dataclass
class Census:
    """Counts over the modules read so far. Places are `file:line`."""

    modules: Counter[str] = field(default_factory=Counter)
    classes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    words: int = 0
    pronouns: int = 0
    relatives: list[str] = field(default_factory=list)
    longest: tuple[int, str] = (0, "")

    def add(self, name: str, source: str) -> None:
        """Count one module; `name` is its path in the repository."""
        path = Path(name)
        if path.name != "__init__.py":
            self.modules[str(path.parent)] += 1
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                self.classes[node.name].add(name)
            if isinstance(node, _FUNCTIONS):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                self.longest = max(self.longest, (length, f"{name}:{node.lineno}"))
            if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
                self._add_prose(text.split("\n\n")[0], f"{name}:{getattr(node, 'lineno', 1)}")

    def _add_prose(self, paragraph: str, place: str) -> None:
        words = re.findall(r"[a-z']+", paragraph.lower())
        self.words += len(words)
        self.pronouns += sum(PRONOUN.fullmatch(word) is not None for word in words)
        if words and RELATIVE.fullmatch(words[0]):
            self.relatives.append(place)

    @property
    def shared_names(self) -> list[str]:
        """Class names of more than one module."""
        return sorted(name for name, modules in self.classes.items() if len(modules) > 1)


def main(
    limits: Annotated[bool, typer.Option("--limits", help="Exit with 1 where a figure is over its limit.")] = False,
) -> None:
    """Print every figure of the repository in the current folder, and where the worst places are."""
    command = ["git", "ls-files", "*.py"]
    files = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    sources = {name: Path(name).read_text() for name in files}
    census = Census()
    for name in _within(sources, *PRODUCT):
        census.add(name, sources[name])
    is_well = show(figures(sources, census, Path("README.md").read_text()))
    print("fullest folders:", ", ".join(f"{folder} {count}" for folder, count in census.modules.most_common(5)))
    print("class names used twice:", ", ".join(census.shared_names[:20]) or "none")
    print("openings with a relative:", ", ".join(census.relatives[:5]) or "none")
    print("longest function:", census.longest[1])
    sys.exit(int(limits and not is_well))


def figures(sources: Mapping[str, str], census: Census, readme: str) -> dict[str, float]:
    """The figures by name. `sources` has the text of every Python file, `census` the product's modules."""

    def lines(*folders: str) -> int:
        return sum(sources[name].count("\n") for name in _within(sources, *folders))

    return {
        "product lines": lines(*PRODUCT),
        "tools lines": lines("tools"),
        "test lines": lines("tests"),
        "product files": len(list(_within(sources, *PRODUCT))),
        "modules in a folder": max(census.modules.values(), default=0),
        "class names used twice": len(census.shared_names),
        "pronouns, % of docstring words": round(100 * census.pronouns / max(1, census.words), 1),
        "docstrings that begin with a relative": len(census.relatives),
        "README lines": readme.count("\n"),
        "longest function": census.longest[0],
    }


def show(figures: Mapping[str, float]) -> bool:
    """Print figures beside their limits. Return whether each is within its own."""
    for name, value in figures.items():
        limit = f"   limit {LIMITS[name]:g}" if name in LIMITS else ""
        print(f"{name:40s} {value:>8g}{limit}")
    over = [name for name, value in figures.items() if name in LIMITS and value > LIMITS[name]]
    print("\n".join(f"over its limit: {name}: {ADVICE[name]}" for name in over) or "all within their limits")
    return not over


def _within(names: Iterable[str], *folders: str) -> Iterator[str]:
    return (name for name in names if name.split("/")[0] in folders)


if __name__ == "__main__":
    typer.run(main)
