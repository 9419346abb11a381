"""The roles of workers, and the roles allowed for a model. Imports no role before its use: each loads an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from common.errors import TriptychError
from common.messages import WORKER_ROLES, Role
from common.model_info import ModelInfo

if TYPE_CHECKING:
    from services.worker_context import RoleService, WorkerContext

_ENCODING_ROLES: Final = ("encoder", "encode_prefill_decode")


def check_role(name: str, info: ModelInfo) -> Role:
    """Return the role of a name. Raises TriptychError("invalid_request") for roles unknown, or unfit for the model."""
    if name not in WORKER_ROLES:
        raise TriptychError("invalid_request", f"role {name!r} is none of {', '.join(WORKER_ROLES)}", "role")
    if name in _ENCODING_ROLES and info.media_kind is None:
        message = f"{info.name} takes no media and needs no encoder: prefill_decode workers are enough"
        raise TriptychError("invalid_request", message, "role")
    return name


def make_role(role: Role, context: WorkerContext) -> RoleService:
    """The service of a role; must be called on the loop."""
    match role:
        case "encoder":
            from services.roles.encoder import EncoderService

            return EncoderService(context)
        case "prefill":
            from services.roles.prefill import PrefillService

            return PrefillService(context)
        case _:
            from services.roles.decoder import DecodeService, EncodePrefillDecodeService, PrefillDecodeService

            services = DecodeService, PrefillDecodeService, EncodePrefillDecodeService
            return next(service(context) for service in services if service.role == role)
