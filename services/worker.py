"""Entrance of a worker process."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import uuid
from collections.abc import Sequence
from multiprocessing import resource_tracker
from typing import Any, Final, NoReturn, cast

from common.config import Settings
from common.errors import TriptychError
from common.messages import Role
from common.model_info import ModelInfo, load_model_info
from common.process import malloc, memory_upkeep, openmp
from common.process.stack_dump import dump_on_signal
from common.telemetry import get_logger, setup_logging
from services.roles.factory import check_role, make_role

RECEIVING: Final = frozenset[Role]({"prefill", "decode", "prefill_decode"})
"""Roles that receive tensors. Other roles return the memory of a burst to the system."""

log = get_logger()


def run(settings: Settings, role: Role) -> int:
    """Run one worker until a signal to end or a drain; return the exit status of the process.

    A switch to another role does not return: the process starts anew under the same instance id. Errors of the start
    are one line of the log, with status 1. SIGUSR1 writes all stacks to the log.
    """
    malloc.use_one_arena()
    malloc.reuse_large_blocks()
    instance_id = settings.instance_id or f"worker-{uuid.uuid4().hex[:8]}"
    settings = settings.model_copy(update={"instance_id": instance_id})
    setup_logging(settings.log_level, settings.log_format, instance_id)
    dump_on_signal()
    _limit_threads(settings.engine.num_threads)
    try:
        from engine.processors import make_processor

        info = load_model_info(settings.model, settings.lora_modules)
        if info.media_kind is not None:
            make_processor(info)  # the children that preprocess could not tell why it does not fit
        status, next_role = asyncio.run(_run(settings, info, check_role(role, info)))
        if next_role is not None:
            _become(next_role, instance_id)
        return status
    except (TriptychError, OSError) as error:
        log.error("this worker cannot start", role=role, error=str(error))
        return 1
    finally:
        gc.freeze()  # no last collection over torch's modules, which would take a second


async def _run(settings: Settings, info: ModelInfo, role: Role) -> tuple[int, Role | None]:
    from engine.device.choice import choose_device, choose_dtype
    from services.worker_process import WorkerProcess

    dtype = choose_dtype(settings.engine.dtype, choose_device(settings.engine.device), info)
    name = str(dtype).removeprefix("torch.")

    def begin_upkeep() -> None:
        if role in RECEIVING:
            memory_upkeep.begin(malloc.KEPT_BYTES)
        else:
            memory_upkeep.begin(is_idle=worker.is_idle)

    worker = WorkerProcess(settings, info, name, lambda context: make_role(role, context), begin_upkeep)
    status = await worker.run()
    if worker.abandons_engine and worker.next_role is None:  # the interpreter might wait for engine threads
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status, worker.next_role


def _become(role: Role, instance_id: str) -> NoReturn:
    """Start this process anew in another role. Process id, instance id and all other options stay.

    Raises TriptychError for a command line without `--role`.
    """
    command = [sys.executable, *with_role(sys.orig_argv[1:], role)]
    log.info("starting anew", role=role)
    os.environ["TRIPTYCH_INSTANCE_ID"] = instance_id  # it may be generated
    cast(Any, resource_tracker)._resource_tracker._stop()  # a child that the next program would never reap
    os.execv(sys.executable, command)


def with_role(arguments: Sequence[str], role: Role) -> list[str]:
    """Return a worker's command line with another role. Raises TriptychError("invalid_request") without `--role`."""
    for index, argument in enumerate(arguments):
        if argument == "--role":
            return [*arguments[: index + 1], role, *arguments[index + 2 :]]
        if argument.startswith("--role="):
            return [*arguments[:index], f"--role={role}", *arguments[index + 1 :]]
    message = f"cannot become a {role} worker: this process was not started with `triptych worker --role ROLE`"
    raise TriptychError("invalid_request", message, "role")


def _limit_threads(num_threads: int | None) -> None:
    """Tell OpenMP before torch loads it: waiting threads of several workers must not spin on shared cores."""
    openmp.set_defaults(os.environ)
    if num_threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[name] = str(num_threads)
    if "torch" in sys.modules:
        log.debug("torch was imported before the worker started: OpenMP settings may come too late")
