"""Real checkpoints: a decode step over the bytes that it must read, and tokens per second beside transformers' own
`generate` on the same device in the same dtype."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Final, cast

from common.config import Device
from common.model_info import ModelInfo, load_model_info
from engine.core.decoder_engine import DecoderEngine
from engine.device.choice import choose_dtype
from tools.bench.gpu.attention import THEIRS, of_both, of_cluster
from tools.bench.gpu.cross import measure_clips
from tools.bench.gpu.decode import GOALS, least_step_s, measure_steps
from tools.bench.gpu.engines import load_decoder
from tools.bench.gpu.figures import Figure, rate, ratio
from tools.bench.gpu.setup import Setup, attempted, side_by_side
from tools.bench.lineup import CLUSTER_SHARE, lineup, share_of
from tools.bench.measure import Schedule, Turn
from tools.bench.measure import measure as measure_turns
from tools.bench.with_cluster import ClusterSystem
from tools.bench.workloads import make_workload

BATCHES: Final = (1, 8, 64, 256)
CONTEXT, STEPS = 512, 32
CLIP_STEPS: Final = 16
"""A clip's answer is short."""
IN_FLIGHT, REPETITIONS = 32, 2
TOY_BATCHES, TOY_CONTEXT, TOY_STEPS, TOY_IN_FLIGHT, TOY_REPETITIONS = (2,), 12, 2, 2, 1


def measure(setup: Setup) -> Iterator[Figure]:
    """For each checkpoint a figure for each batch, and three rows of tokens/s. Nothing where there is no checkpoint."""
    infos = [load_model_info(str(folder)) for folder in setup.checkpoints]
    makers = {info.folder: partial(_start_cluster, setup, info, len(infos)) for info in infos}
    with side_by_side(makers, ClusterSystem.close) as clusters:
        for info in infos:
            yield from attempted("small", f"{info.name}, decode", partial(_measure_steps, setup, info))
            measure = partial(_measure_systems, setup, info, clusters[info.folder])
            yield from attempted("small", f"{info.name}, tokens/s", measure)


def _start_cluster(setup: Setup, info: ModelInfo, count: int) -> ClusterSystem:
    """One of so many that are there at the same time; a cluster that is asked nothing takes no time of the device."""
    dtype = choose_dtype("auto", setup.device, info)
    share = share_of(setup.device, CLUSTER_SHARE / count)
    return ClusterSystem(info, str(dtype).removeprefix("torch."), **share)


def _measure_steps(setup: Setup, info: ModelInfo) -> Iterator[Figure]:
    batches = TOY_BATCHES if setup.toy else BATCHES
    engine = load_decoder(setup, info, max_num_seqs=max(batches), max_num_batched_tokens=8192)
    for batch in batches:
        yield from attempted("small", f"{info.name}, batch {batch}", partial(_measure_batch, setup, engine, batch))


def _measure_batch(setup: Setup, engine: DecoderEngine, batch: int) -> Iterator[Figure]:
    case, goal = f"{engine.info.name}, batch {batch}", GOALS.get(batch)
    if engine.info.is_encoder_decoder:
        yield measure_clips(setup, engine, batch, TOY_STEPS if setup.toy else CLIP_STEPS, "small", case, goal)
    else:
        context, steps = (TOY_CONTEXT, TOY_STEPS) if setup.toy else (CONTEXT, STEPS)
        yield measure_steps(setup, engine, batch, context, steps, "small", case, goal)


def _measure_systems(setup: Setup, info: ModelInfo, started: Future[ClusterSystem]) -> Iterator[Figure]:
    """In turns, for so many requests at once; the first system is transformers."""
    cluster, workload = started.result(), make_workload(str(info.folder))
    dtype = choose_dtype("auto", setup.device, info)
    in_flight, repetitions = (TOY_IN_FLIGHT, TOY_REPETITIONS) if setup.toy else (IN_FLIGHT, REPETITIONS)
    with lineup(workload, device=cast(Device, setup.device.type), cluster=cluster) as systems:
        turns = measure_turns(workload, systems, Schedule([in_flight], repetitions, in_flight), print)
        names = [system.name for system in systems]
        of_llm = of_both(systems[1].llm)
    attention = dict(zip(names, (THEIRS, of_llm, of_cluster(cluster.cluster, info, setup.device, dtype)), strict=True))
    by_system = {name: [turn for turn in turns if turn.system == name] for name in names}
    theirs = by_system[names[0]]
    limit = in_flight / least_step_s(setup.limits, info.folder, dtype, in_flight)
    for name, own in by_system.items():
        times = ratio([1 / turn.tokens_per_s for turn in own], [1 / turn.tokens_per_s for turn in theirs])
        equal = (
            f"{times} transformers'; {_num_equal(own, theirs)} of {repetitions * in_flight} answers equal to its own"
        )
        case = f"{workload.name}, {in_flight} in flight, {name}"
        figure = rate("small", case, "tokens/s", [1 / turn.tokens_per_s for turn in own], 1, limit, equal)
        yield attention[name].of(figure)


def _num_equal(mine: list[Turn], theirs: list[Turn]) -> int:
    return sum(
        one.text.strip() == other.text.strip()
        for turn, base in zip(mine, theirs, strict=True)
        for one, other in zip(turn.outcomes, base.outcomes, strict=True)
    )
