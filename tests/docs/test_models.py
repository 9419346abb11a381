"""docs/reference/models.md lists what common/families.py supports, and what is not in it is refused by name."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from common.errors import TriptychError
from common.families import FAMILIES, Family, find_family

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def test_the_list_of_models_is_the_table() -> None:
    page = PAGE.read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    expected = [_row(family) for family in FAMILIES]
    difference = "\n".join(
        difflib.unified_diff(sorted(rows), sorted(expected), "docs/reference/models.md", "FAMILIES", n=0)
    )
    assert not difference, f"docs/reference/models.md and common/families.py differ:\n{difference}"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.name))
def test_an_entry_names_what_it_needs_and_no_more(family: Family) -> None:
    assert family.decoder
    assert bool(family.encoder) == bool(family.processor) == (family.media_kind is not None)
    assert not (family.is_encoder_decoder and not family.cross_attention)
    assert not (family.placeholder and family.media_kind is None)


def test_architectures_and_names_are_unique() -> None:
    architectures = [name for family in FAMILIES for name in family.architectures]
    assert len(set(architectures)) == len(architectures)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize(
    ("architecture", "closest"),
    [("LLamaForCausalLM", "LlamaForCausalLM"), ("Qwen3MoeForCausalLM", "Qwen3ForCausalLM")],
)
def test_an_unsupported_architecture_is_refused_with_the_closest_name_and_all_others(
    architecture: str, closest: str
) -> None:
    with pytest.raises(
        TriptychError, match=f"{architecture} is not supported; of its kind .*{closest}.* (is|are);"
    ) as caught:
        find_family(architecture)
    assert caught.value.info.code == "model_not_found"
    for family in FAMILIES:
        for name in family.architectures:
            assert name in str(caught.value)


def test_nothing_is_called_close_that_is_not() -> None:
    with pytest.raises(TriptychError, match="architecture Xyz is not supported; supported: Bart"):
        find_family("Xyz")


def _row(family: Family) -> str:
    architectures = ", ".join(f"`{name}`" for name in family.architectures)
    takes = {None: "text", "image": "text and images", "audio": "text and audio", "text": "text, encoded"}
    if family.media_kind is None:
        how = "no encoder"
    elif family.is_encoder_decoder:
        how = "cross-attention to one input"
    elif family.cross_attention:
        how = "cross-attention to inputs in the prompt"
    else:
        how = "rows in place of embeddings"
    kind = "audio" if family.media_kind == "audio" and family.is_encoder_decoder else takes[family.media_kind]
    kind = "text, images and videos" if family.video else kind
    return f"| `{family.name}` | {architectures} | {kind} | {how} |"
