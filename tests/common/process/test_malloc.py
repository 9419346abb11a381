"""What malloc is told: looked at from outside, in processes that have been told it and processes that have not."""

from __future__ import annotations

import sys

import pytest

from tests.common.process.heaps import PROGRAM, printed_by

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is glibc's malloc that is told")
MIB = 2**20

_BETWEEN_SMALL_ONES = """
free([block(16 * 2**20)])  # the default threshold is as high afterwards
before = resident()
large = []
for _ in range(8):
    large.append(block(4 * 2**20))
    block(2**16)  # lives on, behind the large one
free(large)
print(resident() - before)
"""

_AGAIN_AND_AGAIN = """
for number in range(11):
    if number == 1:
        before = touched()
    free([block(4 * 2**20) for _ in range(8)])
print(touched() - before)
"""

_GIVEN_BACK = """
before = resident()
free_burst()
malloc.return_free_pages(KEEP)
print(resident() - before)
"""

_MUCH_AT_ONCE = """
before = resident()
free([block(4 * 2**20) for _ in range(40)])
print(resident() - before)
"""


def _bytes(load: str, setting: str) -> int:
    """What a process says that has been told this."""
    return int(printed_by(f"{PROGRAM}\n{setting}\n{load}"))


def test_large_blocks_between_small_ones_go_back_to_the_system() -> None:
    assert _bytes(_BETWEEN_SMALL_ONES, "malloc.map_large_blocks()") < 2 * MIB  # half a MiB lives on


def test_without_being_told_it_keeps_them() -> None:
    assert _bytes(_BETWEEN_SMALL_ONES, "") > 16 * MIB


def test_large_blocks_are_used_again() -> None:
    """Ten times 32 MiB."""
    assert _bytes(_AGAIN_AND_AGAIN, "malloc.reuse_large_blocks()") < 2 * MIB


def test_without_being_told_it_gives_them_back_and_takes_new_ones() -> None:
    assert _bytes(_AGAIN_AND_AGAIN, "") > 300 * MIB


def test_what_is_kept_for_use_is_bounded() -> None:
    """Of 160 MiB."""
    assert 60 * MIB < _bytes(_MUCH_AT_ONCE, "malloc.reuse_large_blocks()") < 68 * MIB


def test_free_pages_between_small_blocks_can_be_given_back() -> None:
    """Of 64 MiB."""
    assert _bytes(_GIVEN_BACK.replace("malloc.return_free_pages(KEEP)", ""), "malloc.use_one_arena()") > 60 * MIB
    assert _bytes(_GIVEN_BACK.replace("KEEP", "0"), "malloc.use_one_arena()") < 12 * MIB  # pages with something on them


def test_the_free_end_of_the_heap_can_be_kept() -> None:
    program = _MUCH_AT_ONCE.replace("print", "malloc.return_free_pages(32 * 2**20)\nprint")
    assert 28 * MIB < _bytes(program, "malloc.reuse_large_blocks()") < 36 * MIB
