"""Topologies: how many instances of each role, written `2e1pd`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.errors import TriptychError
from common.messages import Role
from common.model_info import ModelInfo

_PART = re.compile(r"(\d+)([a-z]+)")
_PLANNED = {
    "p": "prefill apart from decode",
    "d": "decode apart from prefill",
    "epd": "all stages in one worker",
    "ep": "encode and prefill in one worker",
}
MAX_INSTANCES = 64


@dataclass(frozen=True)
class Topology:
    """How many workers of each role a cluster has; its text form is `NeMpd`."""

    encoders: int
    prefill_decodes: int

    def __str__(self) -> str:
        return (f"{self.encoders}e" if self.encoders else "") + f"{self.prefill_decodes}pd"

    def workers(self) -> list[tuple[str, Role]]:
        """Instance ids and roles, the slowest to start first."""
        decoders: list[tuple[str, Role]] = [(f"pd{i}", "prefill_decode") for i in range(self.prefill_decodes)]
        encoders: list[tuple[str, Role]] = [(f"e{i}", "encoder") for i in range(self.encoders)]
        return decoders + encoders


def parse_topology(text: str) -> Topology:
    """Read `NeMpd`, such as `1e1pd`, `2e1pd` or `1pd`.

    Raises TriptychError("invalid_request") saying which part is wrong and what would be right.
    """
    parts = _PART.findall(text.strip().lower())
    if not parts or "".join(count + role for count, role in parts) != text.strip().lower():
        raise _invalid(text, "write a count before each role, such as 1e1pd (one encoder, one prefill-decode worker)")
    counts: dict[str, int] = {}
    for count, role in parts:
        _check_part(text, int(count), role, counts)
        counts[role] = int(count)
    if "pd" not in counts:
        raise _invalid(text, f"nothing would decode: add a prefill-decode worker, such as {counts['e']}e1pd")
    return Topology(encoders=counts.get("e", 0), prefill_decodes=counts["pd"])


def _check_part(text: str, count: int, role: str, seen: dict[str, int]) -> None:
    if role in _PLANNED:
        raise _invalid(text, f"role {role!r} ({_PLANNED[role]}) is not available in this version; use e and pd")
    if role not in ("e", "pd"):
        raise _invalid(text, f"there is no role {role!r}; roles are e (encoder) and pd (prefill-decode)")
    if role in seen:
        raise _invalid(text, f"role {role!r} stands there twice: add the two counts")
    if role == "pd" and count == 0:
        raise _invalid(text, "0pd leaves nothing that decodes: at least 1pd is needed")
    if count > MAX_INSTANCES:
        raise _invalid(text, f"{count}{role} is more than the {MAX_INSTANCES} instances of one host")


def choose_topology(text: str | None, info: ModelInfo) -> Topology:
    """The topology asked for, checked against the model; the model's usual one if none was.

    Raises TriptychError("invalid_request") where the two do not fit.
    """
    needs_encoder = info.media_kind is not None
    if text is None:
        return Topology(encoders=1 if needs_encoder else 0, prefill_decodes=1)
    topology = parse_topology(text)
    if needs_encoder and not topology.encoders:
        raise _invalid(text, f"{info.name} takes {info.media_kind} inputs and needs an encoder: use 1e{topology}")
    if topology.encoders and not needs_encoder:
        fitting = Topology(0, topology.prefill_decodes)
        raise _invalid(text, f"{info.name} is a text-only model without an encoder: use {fitting}")
    return topology


def _invalid(text: str, why: str) -> TriptychError:
    return TriptychError("invalid_request", f"topology {text!r}: {why}", "topology")
