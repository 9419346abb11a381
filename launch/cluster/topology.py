"""Topologies: how many instances of each role, written `2e1pd`, `1e1p1d` or `1epd`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from common.errors import TriptychError, invalid
from common.messages import Role
from common.model_info import ModelInfo

LETTERS: Final[dict[Role, str]] = {
    "encoder": "e",
    "prefill": "p",
    "decode": "d",
    "prefill_decode": "pd",
    "encode_prefill_decode": "epd",
}
"""The roles of workers, in the order in which a topology names them."""
_ROLES: Final[dict[str, Role]] = {letters: role for role, letters in LETTERS.items()}
_NAMES: Final = ", ".join(f"{letters} ({role})" for role, letters in LETTERS.items())
_PART: Final = re.compile(r"(\d+)([a-z]+)")
MAX_INSTANCES: Final = 64


@dataclass(frozen=True)
class Topology:
    """Numbers of workers of each role; the text form names roles with workers only."""

    encoder: int = 0
    prefill: int = 0
    decode: int = 0
    prefill_decode: int = 0
    encode_prefill_decode: int = 0

    def __str__(self) -> str:
        return "".join(f"{self.count(role)}{letters}" for role, letters in LETTERS.items() if self.count(role))

    def count(self, role: Role) -> int:
        """Return the number of workers of a role."""
        return int(getattr(self, role))

    def workers(self) -> list[tuple[str, Role]]:
        """Return instance ids (`e0`, `pd1`) and roles, decoders first: decoders are the slowest to start."""
        return [(f"{LETTERS[role]}{i}", role) for role in reversed(LETTERS) for i in range(self.count(role))]


def parse_topology(text: str) -> Topology:
    """Parse a count before each role, for example `1e1pd`, `2e2p2d` or `1epd`.

    Raises TriptychError("invalid_request") saying which part is wrong and what would be right.
    """
    bare = text.strip().lower()
    bare = f"1{bare}" if bare in _ROLES else bare  # `epd`: one of it
    parts = _PART.findall(bare)
    if not parts or "".join(count + letters for count, letters in parts) != bare:
        raise _invalid(text, "write a count before each role, such as 1e1pd (one encoder, one prefill-decode worker)")
    counts: dict[Role, int] = {}
    for count, letters in parts:
        if letters not in _ROLES:
            raise _invalid(text, f"there is no role {letters!r}; roles are {_NAMES}")
        if _ROLES[letters] in counts:
            raise _invalid(text, f"role {letters!r} stands there twice: add the two counts")
        if int(count) > MAX_INSTANCES:
            raise _invalid(text, f"{int(count)}{letters} is more than the {MAX_INSTANCES} instances of one host")
        counts[_ROLES[letters]] = int(count)
    topology = Topology(**counts)
    # Each request needs a route, and each worker gets work.
    if topology.prefill and not topology.decode:
        raise _invalid(text, "a prefill worker (p) hands its keys and values to a decode worker: add 1d, or write pd")
    if topology.decode and not topology.prefill:
        raise _invalid(text, "a decode worker (d) gets its keys and values from a prefill worker: add 1p, or write pd")
    if not (topology.decode or topology.prefill_decode or topology.encode_prefill_decode):
        raise _invalid(text, "nothing would decode: add a prefill-decode worker, such as 1e1pd")
    return topology


def choose_topology(text: str, info: ModelInfo, encoder_fallback: bool = False) -> Topology:
    """The topology asked for, checked against the model.

    With `encoder_fallback`, workers that prefill encode what no encoder does. Raises TriptychError("invalid_request")
    where the two do not fit.
    """
    topology = parse_topology(text)
    encoding = topology.encoder or topology.encode_prefill_decode
    if info.media_kind is None and encoding:
        merged = topology.prefill_decode + topology.encode_prefill_decode
        bare = Topology(0, topology.prefill, topology.decode, merged or int(not topology.decode))
        raise _invalid(text, f"{info.name} is a text-only model without an encoder: use {bare}")
    encodes_nothing = topology.prefill or topology.prefill_decode
    if info.media_kind is not None and encodes_nothing and not topology.encoder and not encoder_fallback:
        message = f"{info.name} takes {info.media_kind} inputs and needs an encoder: use 1e{topology}"
        raise _invalid(text, f"{message}, or --encoder-fallback to encode where the prompt is prefilled")
    return topology


def usual_topology(info: ModelInfo, cores: int | None) -> tuple[Topology, str]:
    """Return a model's topology for users who choose none, and the reason, for a person; `cores` is None on a GPU.

    Speech is mostly encoding, one window of 30 s after the other, and an encoder's weights are small.
    """
    if info.media_kind is None:
        return Topology(prefill_decode=1), "a text-only model: no encoder"
    if info.media_kind == "audio" and info.is_encoder_decoder and cores is not None and cores > 1:
        return Topology(encoder=2, prefill_decode=1), "speech is mostly encoding: two encoders"
    return Topology(encoder=1, prefill_decode=1), ""


def _invalid(text: str, why: str) -> TriptychError:
    return invalid(f"topology {text!r}: {why}", "topology")
