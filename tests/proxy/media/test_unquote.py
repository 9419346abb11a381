"""Percent-encoded text is decoded as by the standard library, whatever stands at the seams of the pieces."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.media.intake import unquote

TEXTS = st.lists(
    st.sampled_from(
        ["%", "%41", "%4", "%zz", "%%41", "%4%41", "a", "=", "=41", "_", "\n", "\r\n ", "é", "%e9", "%E9", "%00"]
    )
).map("".join)


@pytest.fixture(autouse=True, scope="module")
def _small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxy.media.intake._PIECE", 5)
        yield


@given(TEXTS | st.text(st.characters(exclude_categories=["Cs"])))
def test_decoded_is_what_the_standard_library_makes_of_it(text: str) -> None:
    assert unquote(text) == unquote_to_bytes(text)
    assert len(text) - 2 * text.count("%") <= len(unquote(text)), "the bound that is checked before"
