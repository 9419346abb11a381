"""Steps that were recorded and are replayed say what eager ones say, whatever the batch does meanwhile.

Without a GPU, recorded work is done again by calling it: buffers at fixed addresses, padding and the choice between
both paths are the same ones. With a GPU (marked `gpu`), CUDA graphs are recorded.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from common.model_info import ModelInfo, load_model_info
from engine.attention.backend import PlanSizes
from engine.attention.metadata import AttentionMetadata
from engine.cache.block_manager import BlockManager
from engine.cache.encoder_cache import EncoderCacheManager
from engine.core.decoder_engine import DecoderEngine
from engine.runner import profile
from engine.runner.decoder import StepOutput
from engine.runner.graphs import GraphParts, StepGraphs, _make_plans, graph_sizes
from engine.runner.last_tokens import LastTokens
from engine.state.inputs import ScheduledStep, StepInputs
from tests import tiny_models
from tests.engine.conftest import AUDIO_FRAMES
from tests.engine.device.test_h2d import DEVICES, needs_gpu
from tests.engine.driving import Driver, Job, greedy, make_engine, run, sampled, text, text_tokens
from tests.fake_flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from tests.fake_flashinfer.installed import flashinfer_on_cpu
from tests.fake_flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from tests.plain_recorder import PlainRecorder
from tests.tiny.mllama import make_mllama

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FAMILIES = ("tiny_llama", "tiny_vision", "tiny_mllama", "tiny_speech", "tiny_bart", "tiny_t5")


@pytest.fixture(params=FAMILIES)
def info(request: pytest.FixtureRequest) -> ModelInfo:
    found: ModelInfo = request.getfixturevalue(request.param)
    return found


def eager(info: ModelInfo, **options: Any) -> DecoderEngine:
    """On CUDA with a small share of the device: other tests run beside these."""
    share = {"memory_fraction": 0.1} if options.get("device") == "cuda" else {}
    usual = {"attention_backend": "torch", "num_blocks": 60, "enforce_eager": True}
    return make_engine(info, **{**usual, **share, **options})


def recorded(info: ModelInfo, **options: Any) -> DecoderEngine:
    """On CUDA an engine records by itself; on a CPU it is told to, and for CUDA's batch sizes."""
    if options.get("device") == "cuda":
        return eager(info, enforce_eager=False, **options)
    engine = eager(info, **options)
    engine.runner.graph_sizes = graph_sizes(CUDA, engine.config.max_num_seqs, 10**4)
    engine.runner.record_graphs(PlainRecorder())
    return engine


def graphs_of(engine: DecoderEngine) -> StepGraphs:
    assert engine.runner.graphs is not None
    return engine.runner.graphs


def mixed_jobs(info: ModelInfo) -> list[Job]:
    """Of different lengths, ends and kinds; with media where the model takes them."""

    def job(name: str, length: int, params: Any) -> Job:
        if info.is_encoder_decoder:
            rows = AUDIO_FRAMES if info.media_kind == "audio" else length + 3
            return Job(name, text_tokens(length, 2), params, [(f"content {length}", rows)])
        if info.media_kind:
            tokens = [*text_tokens(length, length), info.placeholder_token_id or 0, *text_tokens(length + 1, 3)]
            return Job(name, tokens, params, [(f"content {length}", 4)])
        return text(name, length, params)

    return [
        job("short", 3, greedy(4)),
        job("long", 9, greedy(17)),
        job("several", 5, sampled(9, n=3)),  # forks: shared blocks are copied on write
        job("beams", 4, greedy(7, n=2, beam_width=2)),
        job("drawn", 6, sampled(13)),
    ]


def run_staggered(engine: DecoderEngine, jobs: list[Job]) -> Driver:
    """The batch grows while some sequences decode, and shrinks as they end."""
    driver = Driver(engine)
    for job in jobs:
        driver.add(job)
        for _ in range(3):
            driver.step()
    driver.finish()
    return driver


@pytest.mark.parametrize("device", DEVICES)
def test_replayed_steps_say_what_eager_ones_say(info: ModelInfo, device: str) -> None:
    jobs = mixed_jobs(info)
    expected = run_staggered(eager(info, device=device, dtype="float32"), jobs)
    engine = recorded(info, device=device, dtype="float32")
    got = run_staggered(engine, jobs)
    assert not got.failures
    assert got.tokens == expected.tokens
    assert graphs_of(engine).num_replays > 10


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["swap", "recompute"])
def test_sequences_that_lose_their_blocks_go_on_in_others(tiny_vision: ModelInfo, policy: str, device: str) -> None:
    jobs = mixed_jobs(tiny_vision)
    engine = recorded(
        tiny_vision,
        device=device,
        dtype="float32",
        num_blocks=16,
        preemption=policy,
        swap_bytes=2**20,
        prefix_caching=False,
    )
    got = run_staggered(engine, jobs)
    assert engine.scheduler.counters["preemptions"] > 0
    assert got.tokens == run_staggered(eager(tiny_vision, device=device, dtype="float32"), jobs).tokens
    assert graphs_of(engine).num_replays > 10


@pytest.mark.parametrize("device", DEVICES)
def test_steps_that_are_launched_ahead_are_replayed(info: ModelInfo, device: str) -> None:
    jobs = [job for job in mixed_jobs(info) if job.name != "beams"]  # these always wait
    engine = recorded(info, device=device, dtype="float32", async_scheduling=True)
    got = run_staggered(engine, jobs)
    assert engine.stats()["steps_ahead_total"] > 10
    assert graphs_of(engine).num_replays > 10
    plain = eager(info, device=device, dtype="float32", async_scheduling=False)
    assert got.tokens == run_staggered(plain, jobs).tokens


def served_by_flashinfer(folder: Path, family: str) -> ModelInfo:
    """A small model with heads of 64."""
    if family == "llama":
        return load_model_info(str(tiny_models.make_llama(folder, head_dim=64)))
    if family == "mllama":
        return load_model_info(str(make_mllama(folder, num_attention_heads=1, num_key_value_heads=1)))
    heads = {"d_model": 128, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return load_model_info(str(tiny_models.make_whisper(folder, max_source_positions=AUDIO_FRAMES, **heads)))


@pytest.mark.parametrize("family", ["llama", "mllama", "whisper"])
def test_plans_of_flashinfer_are_replayed(tmp_path: Path, family: str) -> None:
    """Its kernels are a fake's, which refuses other addresses and other batch sizes than those of the capture."""
    info = served_by_flashinfer(tmp_path, family)
    jobs = mixed_jobs(info)
    expected = run_staggered(eager(info), jobs)
    with flashinfer_on_cpu():
        engine = recorded(info, attention_backend="flashinfer")
        assert run_staggered(engine, jobs).tokens == expected.tokens
    assert graphs_of(engine).num_replays > 10
    if family != "mllama":  # whose tokens see other pictures than those before them
        assert graphs_of(engine).num_replays == engine.stats()["steps_total"]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("tokens_per_step", [100, 256])
def test_flashinfer_replays_prompts_with_pictures_beside_decodes(
    tmp_path: Path, tokens_per_step: int, ahead: bool
) -> None:
    """Chunks of prompts, rows of encoder outputs at any of them, and M-RoPE's three positions."""
    mrope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "rope_parameters": mrope}
    info = load_model_info(str(tiny_models.make_qwen2_5_vl(tmp_path, **heads)))
    jobs = [job for job in mixed_jobs(info) if job.name != "beams"]
    jobs += [
        Job(f"long {n}", [*text_tokens(n, n), info.placeholder_token_id or 0], greedy(3), [("x", 4)]) for n in (70, 99)
    ]
    options = {"max_num_batched_tokens": tokens_per_step, "prefix_caching": False, "num_blocks": 120}
    expected = run_staggered(eager(info, **options), jobs).tokens
    with flashinfer_on_cpu():
        engine = recorded(info, attention_backend="flashinfer", async_scheduling=ahead, **options)
        assert run_staggered(engine, jobs).tokens == expected
    assert graphs_of(engine).num_replays == engine.stats()["steps_total"]


def test_a_batch_is_padded_up_to_the_next_size() -> None:
    assert graph_sizes(CUDA, 1, 64) == [1]
    assert graph_sizes(CUDA, 6, 64) == [1, 2, 4, 6]
    assert graph_sizes(CUDA, 8, 64) == [1, 2, 4, 8]
    assert graph_sizes(CUDA, 20, 64) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(CUDA, 256, 256)[-3:] == [240, 248, 256]


def test_steps_with_prompts_are_padded_to_more_than_any_batch_of_decodes() -> None:
    assert graph_sizes(CUDA, 1, 2048) == [1, 96, 128, 192, 256, 384, 512, 768, 1024]
    assert graph_sizes(CUDA, 256, 600)[-3:] == [256, 384, 512]


def test_on_a_cpu_batches_are_hardly_padded_and_large_ones_not_recorded() -> None:
    assert graph_sizes(CPU, 256, 5) == [1, 2, 3, 4, 5]
    assert graph_sizes(CPU, 4, 40)[6:] == [7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40]
    assert graph_sizes(CPU, 4, 2048)[-4:] == [144, 160, 176, 192]


def test_padding_writes_to_the_block_that_is_nobodys(tiny_llama: ModelInfo) -> None:
    engine = recorded(tiny_llama, max_num_seqs=4)
    driver = Driver(engine)  # looks after every step whether a key or value of a sequence has changed
    for name in "abc":
        driver.add(text(name, 5, greedy(8)))
    driver.step()
    for cache in engine.runner.caches:
        cache[:, 0] = 0
    driver.step()
    assert graphs_of(engine).sizes == [1, 2, 4]
    for cache in engine.runner.caches:
        assert cache[:, 0, 0].any()
        assert not cache[:, 0, 1:].any()
    driver.finish()


def replays_in(driver: Driver, job: Job) -> list[bool]:
    """For each step of a job: whether it was replayed."""
    driver.add(job)
    graphs, replayed = graphs_of(driver.engine), []
    while driver.engine.has_work():
        before = graphs.num_replays
        driver.step()
        if driver.engine.stats()["last_step_tokens"]:
            replayed.append(graphs.num_replays > before)
    return replayed


def test_where_a_backend_has_no_plan_for_prompts_decodes_alone_are_replayed(tiny_llama: ModelInfo) -> None:
    driver = Driver(recorded(tiny_llama, max_num_batched_tokens=4))
    assert replays_in(driver, text("chunks", 10, greedy(4))) == [False] * 3 + [True] * 3


def test_log_probabilities_of_a_prompt_are_computed_eagerly(tiny_llama: ModelInfo) -> None:
    driver = Driver(recorded(tiny_llama))
    assert replays_in(driver, text("one token", 1, greedy(3))) == [True] * 3
    assert replays_in(driver, text("told", 1, greedy(3, prompt_logprobs=0))) == [False, True, True]


def test_a_single_token_that_is_part_of_a_picture_is_computed_eagerly(tiny_vision: ModelInfo) -> None:
    driver = Driver(recorded(tiny_vision, max_num_batched_tokens=1, prefix_caching=False))
    picture = Job("picture", [7, tiny_vision.placeholder_token_id or 0, 8], greedy(2), [("cat", 3)])
    assert replays_in(driver, picture) == [True, False, False, False, True, True]


PICTURES = "before P cat between P dog P fox behind"
"""A text with pictures that stand apart, and next to each other."""


def jobs_with_and_without_pictures(info: ModelInfo, *prompts: str) -> list[Job]:
    """`P name` in a prompt is a picture of that name, of 5 rows; every other word is a token."""
    jobs = []
    for number, prompt in enumerate(prompts):
        words, tokens, media = iter(prompt.split()), [], []
        for word in words:
            tokens.append(info.placeholder_token_id if word == "P" else text_tokens(zlib.crc32(word.encode()), 1)[0])
            if word == "P":
                media.append((next(words), 5))
        jobs.append(Job(f"{number}: {prompt}", [token or 0 for token in tokens], greedy(8 + number), media))
    return jobs


@pytest.mark.parametrize("tokens_per_step", [1, 64])
def test_each_row_of_a_replayed_step_reads_the_pictures_that_stand_before_it(
    tiny_mllama: ModelInfo, tokens_per_step: int
) -> None:
    """One token at a time, most of a prompt is replayed, too: tokens before and of pictures."""
    prompts = ("a text without any", PICTURES, "P cat and text", "early P cat P dog", "nothing to see", PICTURES[:20])
    jobs = jobs_with_and_without_pictures(tiny_mllama, *prompts)
    options = {"max_num_batched_tokens": tokens_per_step, "prefix_caching": False}
    expected = run_staggered(eager(tiny_mllama, **options), jobs)
    engine = recorded(tiny_mllama, **options)
    got = run_staggered(engine, jobs)
    assert not got.failures
    assert got.tokens == expected.tokens
    assert graphs_of(engine).num_replays > (60 if tokens_per_step == 1 else 10)


def test_flashinfer_replays_what_is_generated_behind_any_pictures(tmp_path: Path) -> None:
    """Whatever stands between them: only what they are followed by is read."""
    info = served_by_flashinfer(tmp_path, "mllama")
    jobs = jobs_with_and_without_pictures(info, "only text", "one P cat here", "P dog there P fox too", "P ant P bee x")
    expected = run(eager(info), jobs).tokens
    with flashinfer_on_cpu():
        engine = recorded(info, attention_backend="flashinfer")
        assert run(engine, jobs).tokens == expected
    assert graphs_of(engine).num_replays == engine.stats()["steps_total"] - 1


def test_texts_alone_are_replayed_by_a_model_that_reads_pictures(tiny_mllama: ModelInfo) -> None:
    """An eager step leaves the layers of cross-attention out; a replayed one passes through them without an effect."""
    jobs = jobs_with_and_without_pictures(tiny_mllama, "one text", "another one")
    engine = recorded(tiny_mllama)
    assert run(engine, jobs).tokens == run(eager(tiny_mllama), jobs).tokens
    assert graphs_of(engine).num_replays == max(job.params.max_tokens for job in jobs) - 1


def test_backends_without_fixed_plans_run_eagerly(tiny_llama: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.attention.torch_backend.TorchBackend.make_fixed_plan", lambda *_, **__: None)
    engine = recorded(tiny_llama)
    assert engine.runner.graphs is None
    assert run(engine, [text("eager", 5, greedy(3))]).tokens["eager", 0]


class Refusing:
    """A recorder that says no as FlashInfer and CUDA do: what they raise is documented nowhere."""

    size_bytes = 0

    def __init__(self, error: Exception) -> None:
        self._error = error

    def record(self, work: Any) -> Any:
        work()
        raise self._error


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, AssertionError, TypeError])
def test_where_a_capture_is_refused_steps_run_eagerly(
    kind: type[Exception], tiny_llama: ModelInfo, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = eager(tiny_llama)
    engine.runner.record_graphs(Refusing(kind("no such kernel")))
    assert engine.runner.graphs is None
    lines = [line for line in "".join(capfd.readouterr()).splitlines() if "steps run eagerly" in line]
    assert len(lines) == 1
    assert f"{kind.__name__}: no such kernel" in lines[0]
    jobs = mixed_jobs(tiny_llama)
    assert run_staggered(engine, jobs).tokens == run_staggered(eager(tiny_llama), jobs).tokens


@pytest.mark.parametrize("call", ["__init__", "plan"])
def test_where_flashinfer_refuses_a_plan_of_decodes_steps_run_eagerly(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those at fixed addresses: the others compute the same answers."""
    wrapper = BatchDecodeWithPagedKVCacheWrapper
    original = getattr(wrapper, call)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        if (len(args) > 2 and args[2] is True) or getattr(self, "_use_cuda_graph", False):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        original(self, *args, **kwargs)

    monkeypatch.setattr(wrapper, call, refuse)
    info = served_by_flashinfer(tmp_path, "llama")
    jobs = mixed_jobs(info)
    expected = run_staggered(eager(info), jobs).tokens
    with flashinfer_on_cpu():
        engine = recorded(info, attention_backend="flashinfer")
        assert engine.runner.graphs is None
        assert run_staggered(engine, jobs).tokens == expected


def test_where_flashinfer_refuses_a_plan_of_prompts_decodes_are_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = BatchPrefillWithPagedKVCacheWrapper._keep

    def refuse(self: Any, arrays: tuple[torch.Tensor, ...], disable_split_kv: bool) -> None:
        if int(arrays[0][-1]) > 200:
            raise ValueError("no room for so many rows")
        keep(self, arrays, disable_split_kv)

    monkeypatch.setattr(BatchPrefillWithPagedKVCacheWrapper, "_keep", refuse)
    info = served_by_flashinfer(tmp_path, "llama")
    jobs = mixed_jobs(info)
    expected = run_staggered(eager(info), jobs).tokens
    with flashinfer_on_cpu():
        engine = recorded(info, attention_backend="flashinfer")
        assert run_staggered(engine, jobs).tokens == expected
    assert graphs_of(engine).sizes[-3:] == [96, 128, 192]
    said = capsys.readouterr()
    assert (said.out + said.err).count("steps with prompts run eagerly") == 5


def test_what_a_start_measures_is_measured_without_graphs_that_are_refused(
    tiny_llama: ModelInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = eager(tiny_llama).runner
    runner.records_graphs = True
    monkeypatch.setattr(runner, "make_recorder", lambda: Refusing(AssertionError("paged_kv_indptr_buffer")))
    assert profile.measure_graphs(runner) == 0


def test_nothing_is_recorded_on_a_cpu_unless_asked_for(tiny_llama: ModelInfo) -> None:
    assert make_engine(tiny_llama).runner.graphs is None


def hide_tokens(engine: DecoderEngine) -> None:
    """From now on the host does not know the newest token of a sequence when its step is launched."""
    runner, known_run = engine.runner, engine.runner.run

    def run_without(step: ScheduledStep, blocks: BlockManager, cache: EncoderCacheManager) -> StepOutput:
        hidden = [sequence for sequence in step.sequences if sequence.num_output_tokens > 0]
        tokens = [sequence.token_ids[-1] for sequence in hidden]
        runner.last_tokens.put([one.slot_index for one in hidden], torch.tensor(tokens, device=runner.device))
        for sequence in hidden:
            sequence.token_ids[-1] = -1
        try:
            return known_run(step, blocks, cache)
        finally:
            for sequence, token in zip(hidden, tokens, strict=True):
                sequence.token_ids[-1] = token

    runner.run = run_without  # type: ignore[method-assign]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [eager, recorded])
def test_tokens_that_only_the_device_knows_are_read_there(tiny_vision: ModelInfo, make: Any, device: str) -> None:
    jobs = mixed_jobs(tiny_vision)
    options: dict[str, Any] = {"device": device, "dtype": "float32", "async_scheduling": False}
    expected = run_staggered(eager(tiny_vision, **options), jobs).tokens
    engine = make(tiny_vision, **options, num_blocks=16, preemption="recompute")
    hide_tokens(engine)
    got = run_staggered(engine, jobs)
    assert engine.stats()["recomputed_tokens_total"] > 0  # tokens that were unknown once are read again
    assert got.tokens == expected


def test_cross_tables_are_prepared_once_while_the_batch_stays(tiny_speech: ModelInfo) -> None:
    engine = eager(tiny_speech, max_num_seqs=2)
    seen: list[AttentionMetadata] = []  # kept, so that none has the id of another
    metadata = engine.runner._cross.metadata

    def watched(step: ScheduledStep, inputs: StepInputs, blocks: BlockManager, *, on_device: bool) -> Any:
        found = metadata(step, inputs, blocks, on_device=on_device)
        assert found is not None
        tables = [blocks.get_cross_block_table(sequence.request.request_id) for sequence in step.sequences]
        assert found.table.tolist() == tables
        assert found.block_table.tolist() == tables
        seen.append(found)
        return found

    engine.runner._cross.metadata = watched  # type: ignore[method-assign]
    counts = {"a": 4, "b": 9, "c": 7}
    run(engine, [Job(name, [7, 8], greedy(count), [(name, AUDIO_FRAMES)]) for name, count in counts.items()])
    batches = [(id(one.host_table), id(one.block_table)) for one in seen]
    assert len(batches) > 10
    assert len(set(batches)) == 3  # a and b; b and c, which has come for a; c, which is left


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=needs_gpu)])
def test_no_step_waits_for_the_device(info: ModelInfo, device: str) -> None:
    """Replayed ones: with heads of this size PyTorch's attention serves the eager ones, which makes its masks anew."""
    engine = recorded(info, device=device, dtype="float32")
    runner, known_run = engine.runner, engine.runner.run

    def run_strictly(step: ScheduledStep, blocks: BlockManager, cache: EncoderCacheManager) -> StepOutput:
        if len(step.sequences) < sum(step.num_tokens) or any(one.num_output_tokens == 0 for one in step.sequences):
            return known_run(step, blocks, cache)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return known_run(step, blocks, cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.run = run_strictly  # type: ignore[method-assign]
    assert run_staggered(engine, mixed_jobs(info)).tokens
    assert graphs_of(engine).num_replays > 10


def test_positions_bias_the_recorded_self_attention_alone() -> None:
    """Or cross-attention of T5 would go to PyTorch for a bias that it does not have."""
    asked: dict[bool, bool] = {}

    def make(sizes: PlanSizes) -> object:
        asked[sizes.causal] = sizes.heads.biased
        return object()

    spec = SimpleNamespace(
        num_heads=2, num_kv_heads=2, head_dim=64, biased=("self",), has_cross_attention=True, windows=(None,)
    )
    parts = SimpleNamespace(
        model=SimpleNamespace(spec=spec),
        backend=SimpleNamespace(make_fixed_plan=make, calls_kernels=False),
        last_tokens=LastTokens(1, CPU),
        caches=[torch.empty(2, 3, 4, 2, 64)],
        max_blocks=3,
        max_cross_blocks=3,
    )
    assert _make_plans(cast(GraphParts, parts), 1) is not None
    assert asked == {True: True, False: False}
