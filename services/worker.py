"""Entrance of a worker process."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from common import openmp
from common.config import Settings
from common.errors import TriptychError
from common.messages import Role
from common.model_info import ModelInfo, load_model_info
from common.telemetry import get_logger, setup_logging

if TYPE_CHECKING:
    from services.links import Links, RoleService

log = get_logger()


def run(settings: Settings, role: Role) -> int:
    """Run one worker until it is told to stop (SIGTERM, SIGINT); returns the process's exit status.

    Errors of configuration and of start are logged in one line, status 1.
    """
    setup_logging(settings.log_level, settings.log_format, settings.instance_id or role)
    _limit_threads(settings.engine.num_threads)
    try:
        info = load_model_info(settings.model)
        return asyncio.run(_run(settings, info, role))
    except (TriptychError, OSError) as error:
        log.error("this worker cannot start", role=role, error=str(error))
        return 1
    finally:
        gc.freeze()  # spares the interpreter a last collection over torch's modules: a second of the way out


async def _run(settings: Settings, info: ModelInfo, role: Role) -> int:
    from engine.device import choose_device, choose_dtype
    from services.shell import Shell

    dtype = choose_dtype(settings.engine.dtype, choose_device(settings.engine.device), info)
    return await Shell(settings, info, str(dtype).removeprefix("torch."), _service_of(role)).run()


def _service_of(role: Role) -> Callable[[Links], RoleService]:
    if role == "encoder":
        from services.encoder import EncoderService

        return EncoderService
    if role == "prefill_decode":
        from services.prefill_decode import PrefillDecodeService

        return PrefillDecodeService
    raise TriptychError("invalid_request", f"role {role!r} is none of encoder, prefill_decode", "role")


def _limit_threads(num_threads: int | None) -> None:
    """Tell OpenMP before torch loads it: waiting threads of several workers must not spin on shared cores."""
    openmp.set_defaults(os.environ)
    if num_threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[name] = str(num_threads)
    if "torch" in sys.modules:
        log.debug("torch was imported before the worker started: OpenMP settings may come too late")
