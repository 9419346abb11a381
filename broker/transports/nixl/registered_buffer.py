"""A piece of registered memory that one tensor is read into, or sent from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, TypeAlias

Kind: TypeAlias = Literal["DRAM", "VRAM"]
"""NIXL's names for memory of the host and of a GPU."""
Where: TypeAlias = tuple[Kind, int]
"""The kind of memory, and the number of the device."""
HOST: Final[Where] = ("DRAM", 0)


class RegisteredBuffer:
    """Free again once all who hold it have let go: its owner, which is the first one, and transfers that may write."""

    def __init__(self, where: Where, address: int, free: Callable[[], None]) -> None:
        """`free` is called once, by the last one to let go."""
        self.where = where
        self.address = address
        self._free = free
        self._num_holders = 1

    def hold(self) -> None:
        """One more needs it."""
        self._num_holders += 1

    def let_go(self) -> None:
        """One of those that hold it does not need it any more."""
        self._num_holders -= 1
        if self._num_holders == 0:
            self._free()
