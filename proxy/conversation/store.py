"""Responses kept for later requests, within a budget of bytes; the longest unused go first."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from common.errors import TriptychError, invalid


@dataclass
class ResponseStore:
    """Holds JSON of responses and of their conversations, at most `limit_bytes` in all; a larger one is not kept."""

    limit_bytes: int
    num_bytes: int = 0
    _kept: OrderedDict[str, tuple[bytes, bytes]] = field(default_factory=OrderedDict)

    def put(self, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keep a response, and the messages of its conversation, its own answer included."""
        entry = json.dumps(response).encode(), json.dumps(messages).encode()
        if sum(map(len, entry)) > self.limit_bytes:
            return
        self._kept[response["id"]] = entry
        self.num_bytes += sum(map(len, entry))
        while self.num_bytes > self.limit_bytes:
            self.num_bytes -= sum(map(len, self._kept.popitem(last=False)[1]))

    def get(self, response_id: str) -> dict[str, Any]:
        """Return a response. Raises TriptychError("not_found") saying why there is none."""
        value: dict[str, Any] = json.loads(self._entry(response_id, "response_id")[0])
        return value

    def messages(self, response_id: str) -> list[dict[str, Any]]:
        """Return the messages of a conversation up to a response.

        Raises TriptychError: "invalid_request" where nothing is kept, "not_found" for an unknown id.
        """
        if not self.limit_bytes:
            message = "previous_response_id needs kept responses: start with --response-store-bytes, or send all items"
            raise invalid(message, "previous_response_id")
        value: list[dict[str, Any]] = json.loads(self._entry(response_id, "previous_response_id")[1])
        return value

    def delete(self, response_id: str) -> None:
        """Forget a response. Raises as `get` does."""
        self.num_bytes -= sum(map(len, self._entry(response_id, "response_id")))
        del self._kept[response_id]

    def _entry(self, response_id: str, param: str) -> tuple[bytes, bytes]:
        if not self.limit_bytes:
            message = "no responses are kept here: start with --response-store-bytes, such as 64MiB"
            raise TriptychError("not_found", message, param)
        if response_id not in self._kept:
            message = f"no response {response_id!r:.80}: unknown, deleted, or displaced (--response-store-bytes)"
            raise TriptychError("not_found", message, param)
        self._kept.move_to_end(response_id)
        return self._kept[response_id]
