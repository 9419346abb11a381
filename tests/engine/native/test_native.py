"""Our own CPU kernels against PyTorch in float32; where they cannot run, everything else works without them."""

from __future__ import annotations

import ctypes
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import WhisperConfig

from engine import native
from engine.attention.select import choose_backend
from engine.encoders.attention import use_kernels
from engine.encoders.whisper import WhisperEncoder
from engine.models import layers
from engine.models.layers import Linear, RMSNorm, rotate, silu_mul, use_layer_kernels
from engine.native import build, ops

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(scope="module", autouse=True, params=["avx2", "avx512", "amx"])
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each kind of processor's kernels, on this processor if it can run them."""
    wide, narrow = build.STEPS
    as_before = {name: getattr(ops, name, None) for name in ("_enabled", "_library", "has_pairs", "pytorch_is_slow")}
    steps = (narrow if request.param == "avx2" else wide,)
    with patch.multiple(ops, create=True, **as_before), patch.object(build, "STEPS", steps):
        build.load_kernels.cache_clear()
        try:
            ops.enable()
        except build.KernelsUnavailableError as error:
            pytest.skip(str(error))
        assert ops.has_pairs == (request.param != "avx2")
        ops._library.use_tiles.restype = ctypes.c_bool
        tiles = request.param == "amx"
        if ops._library.use_tiles(tiles) != tiles:
            pytest.skip("this processor has no AMX")
        yield
        ops._library.use_tiles(True)
    build.load_kernels.cache_clear()


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded(got: Tensor, exact: Tensor) -> None:
    """Equal but for the rounding of the result to bfloat16 (8 bits) and of sums in another order."""
    torch.testing.assert_close(got.float(), exact, rtol=2**-7, atol=1e-3 * float(exact.abs().max()) + 1e-6)


@settings(max_examples=100)
@example(rows=13, columns=24, fours=1, beside=2, biased=True, seed=0)  # the least that is packed
@example(rows=ops.MAX_LINEAR_ROWS, columns=96, fours=50, beside=0, biased=False, seed=0)  # packed at a time
@example(rows=9, columns=25, fours=1, beside=2, biased=True, seed=0)
@example(rows=2, columns=16, fours=8, beside=2, biased=True, seed=0)  # the least for tiles
@example(rows=ops.MAX_LINEAR_ROWS, columns=96, fours=48, beside=0, biased=False, seed=0)
@given(
    rows=st.integers(1, 20) | st.integers(21, ops.MAX_LINEAR_ROWS),
    columns=st.integers(8, 100),
    fours=st.integers(1, 50) | st.sampled_from([8, 16, 32, 48]),
    beside=st.integers(0, 3),
    biased=st.booleans(),
    seed=SEEDS,
)
@torch.inference_mode()
def test_linear(rows: int, columns: int, fours: int, beside: int, biased: bool, seed: int) -> None:
    size = 4 * fours
    layer = Linear(size, columns, bias=biased, dtype=torch.bfloat16)
    layer.weight.copy_(random(seed, columns, size))
    x = random(seed + 1, rows, size + beside)[:, :size]  # rows of a wider tensor
    assert ops.serves_linear(x, layer.weight)
    bias = layer.bias.float() if layer.bias is not None else None
    assert_rounded(layer(x), F.linear(x.float(), layer.weight.float(), bias))


@settings(max_examples=60)
@given(
    st.integers(1, ops.MAX_FLOAT32_ROWS),
    st.integers(8, 100),
    st.integers(1, 50),
    st.integers(0, 3),
    st.booleans(),
    SEEDS,
)
@torch.inference_mode()
def test_linear_in_float32(rows: int, columns: int, fours: int, beside: int, biased: bool, seed: int) -> None:
    layer = Linear(4 * fours, columns, bias=biased)
    x = random(seed, rows, 4 * fours + beside).float()[:, : 4 * fours]
    assert ops.serves_linear(x, layer.weight)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_linear_of_more_dimensions_than_two() -> None:
    layer = Linear(16, 24, dtype=torch.bfloat16)
    x = random(0, 3, 5, 16)
    assert ops.serves_linear(x, layer.weight)
    assert not ops.serves_linear(x.transpose(0, 1), layer.weight)
    assert torch.equal(layer(x), layer(x.flatten(0, 1)).unflatten(0, (3, 5)))


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 150), st.booleans(), SEEDS)
@torch.inference_mode()
def test_norm_with_and_without_a_sum(rows: int, size: int, summed: bool, seed: int) -> None:
    norm = RMSNorm(size, 1e-5).bfloat16()
    norm.weight.copy_(random(seed, size))
    hidden, added = random(seed + 1, rows, size), random(seed + 2, rows, size)
    total = (hidden + added) if summed else hidden.clone()
    got = norm(hidden, added) if summed else norm(hidden)
    assert torch.equal(hidden, total)
    assert_rounded(got, F.rms_norm(total.float(), (size,), norm.weight.float(), 1e-5))


@settings(max_examples=30)
@given(st.integers(1, 20), st.integers(1, 100), SEEDS)
@torch.inference_mode()
def test_gated_activation(rows: int, size: int, seed: int) -> None:
    gate_up = random(seed, rows, 2 * size) * 8
    gate, up = gate_up.float().chunk(2, dim=-1)
    assert_rounded(silu_mul(gate_up), F.silu(gate) * up)


@settings(max_examples=30)
@given(
    st.integers(1, 20),
    st.integers(1, 5),
    st.sampled_from([2, 32, 64, 80, 128]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    SEEDS,
)
@torch.inference_mode()
def test_rotation_changes_its_heads_and_nothing_else(
    tokens: int, heads: int, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    wide = random(seed, tokens, heads + 2, head_dim)
    before = wide.clone()
    cosines, sines = (random(seed + table, tokens, 1, head_dim).to(dtype) for table in (1, 2))
    with patch.object(ops, "_enabled", False):
        expected = rotate(before[:, :heads].float(), cosines.float(), sines.float())
    assert_rounded(rotate(wide[:, :heads], cosines, sines), expected)
    assert torch.equal(wide[:, heads:], before[:, heads:])


@settings(max_examples=40)
@given(
    st.integers(1, 2),
    st.tuples(st.integers(1, 2), st.integers(1, 3)),
    st.tuples(st.integers(6, 140), st.integers(0, 90)),
    st.sampled_from([2, 16, 50, 64, 80, 128]),
    SEEDS,
)
@torch.inference_mode()
def test_dense_attention(
    batch: int, heads: tuple[int, int], lengths: tuple[int, int], head_dim: int, seed: int
) -> None:
    (num_kv_heads, group), (num_queries, past) = heads, lengths
    num_keys = num_queries + past
    query = random(seed, batch, num_queries, num_kv_heads * group, head_dim).transpose(1, 2)
    key = random(seed + 1, batch, num_keys, num_kv_heads, head_dim).transpose(1, 2)
    value = random(seed + 2, batch, num_keys, 3, num_kv_heads, head_dim)[:, :, 2].transpose(1, 2)  # of a fused product
    assert ops.serves_dense(query, key, value) == ops.has_pairs
    exact = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), enable_gqa=True).transpose(1, 2)
    got = ops.dense_attention(query, key, value, head_dim**-0.5).float()
    torch.testing.assert_close(got, exact, rtol=2**-6, atol=2**-6 * float(exact.abs().max()))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 230), st.integers(0, 90)), min_size=1, max_size=4),
    st.tuples(st.integers(1, 2), st.integers(1, 6)),
    st.sampled_from([2, 16, 64, 80, 128]),
    st.sampled_from(["causal", "all", "window", "any"]),
    SEEDS,
)
@torch.inference_mode()
def test_tokens_of_prompts_and_decodes_see_their_ranges_of_paged_keys(
    lengths: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, visible: str, seed: int
) -> None:
    """Tokens that stand side by side are computed together, whatever their ranges: rising, equal, or any, and empty."""
    (num_kv_heads, group), block_size, width = heads, 16, 20
    cache = random(seed, 2, 1 + len(lengths) * width, block_size, num_kv_heads, head_dim)
    tables = 1 + torch.randperm(len(lengths) * width).view(len(lengths), width)
    query = random(seed + 1, sum(count for count, _ in lengths), num_kv_heads * group, head_dim)
    requests, ranges, exact = [], [], []
    for index, (count, past) in enumerate(lengths):
        begins, ends = torch.zeros(count, dtype=torch.int64), torch.full((count,), count + past)
        if visible in ("causal", "window"):
            ends = past + 1 + torch.arange(count)
            begins = (ends - 70).clamp(min=0) if visible == "window" else begins
        elif visible == "any":
            begins, ends = torch.randint(0, count + past + 1, (2, count))
        requests += [index] * count
        ranges.append(torch.stack((begins, ends), dim=1))
        keys, values = cache[:, tables[index]].flatten(1, 2).float().transpose(1, 2)
        places = torch.arange(width * block_size)
        seen = (places >= begins[:, None]) & (places < ends[:, None])
        queries = query[len(requests) - count : len(requests)].float().transpose(0, 1)
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
        exact.append(attended.transpose(0, 1).masked_fill(~seen.any(1)[:, None, None], 0))
    owners = torch.tensor(requests)
    got = ops.paged_attention(query, cache, tables, owners, torch.cat(ranges), head_dim**-0.5, None).float()
    expected = torch.cat(exact)
    torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))


@torch.inference_mode()
def test_a_whisper_encoder_in_bfloat16_is_as_near_to_float32_as_pytorchs() -> None:
    config = WhisperConfig(
        d_model=128, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, max_source_positions=100
    )
    torch.manual_seed(0)
    encoder = WhisperEncoder(config)
    features = torch.randn(2, config.num_mel_bins, 200)
    exact = encoder.module.eval()(features).last_hidden_state
    assert use_kernels(encoder, torch.device("cpu"), torch.bfloat16, "auto")
    ours = encoder.module.bfloat16()(features.bfloat16()).last_hidden_state.float()
    with patch.object(ops, "_enabled", False):
        theirs = encoder.module(features.bfloat16()).last_hidden_state.float()
    assert not (ops.has_pairs and torch.equal(ours, theirs))  # the kernel of attention ran
    assert (ours - exact).norm() < 1.2 * (theirs - exact).norm()


@torch.inference_mode()
def test_an_encoder_convolves_in_float32_where_pytorch_is_slow_in_bfloat16() -> None:
    encoder = WhisperEncoder(WhisperConfig(d_model=64, encoder_layers=1, encoder_attention_heads=1))
    convolution = encoder.module.bfloat16().conv2
    assert use_kernels(encoder, torch.device("cpu"), torch.bfloat16, "auto")
    x = random(0, 2, 64, 30)
    weight, bias = convolution.weight.float(), convolution.bias.float()
    exact = F.conv1d(x.float(), weight, bias, stride=2, padding=1)
    assert not ops.pytorch_is_slow or torch.equal(convolution(x), exact.bfloat16())
    assert_rounded(convolution(x), exact)


@torch.inference_mode()
def test_other_dtypes_and_long_batches_are_pytorchs() -> None:
    weight = random(0, 8, 16)
    assert not ops.serves_linear(random(1, ops.MAX_FLOAT32_ROWS + 1, 16).float(), weight.float())
    assert not ops.serves_linear(random(1, 4, 16).half(), weight.half())
    assert not ops.serves_linear(random(1, 4, 16).float(), weight)
    for is_slow in (False, True):
        with patch.object(ops, "pytorch_is_slow", is_slow):
            assert ops.serves_linear(random(1, ops.MAX_LINEAR_ROWS + 1, 16), weight) == is_slow
    assert not ops.serves_linear(random(1, 4, 16), random(0, 7, 16))
    assert not ops.serves_linear(random(1, 4, 18), random(0, 8, 18))
    with patch.object(ops, "_enabled", False):
        assert not ops.serves_linear(random(1, 4, 16), weight)


def test_without_a_compiler_pytorch_serves_both_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing compiled before is found
    monkeypatch.delenv("CXX", raising=False)
    build.load_kernels.cache_clear()
    try:
        with pytest.raises(build.KernelsUnavailableError, match=r"no C\+\+ compiler"):
            build.load_kernels()
        assert choose_backend(torch.device("cpu")).name == "torch"
    finally:
        build.load_kernels.cache_clear()


@pytest.mark.slow
def test_without_a_home_the_kernels_are_compiled_into_a_folder_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = build.compiled_kernels(build.step_kernels())
    assert path.is_relative_to(tmp_path)
    assert path.exists()


@pytest.mark.parametrize("cache", ["kernels.cpp", "too-long" * 32])  # no folder; a name that cannot be looked for
@pytest.mark.parametrize("cpp", ['extern "C" int one() { return 1; }', "not C++"])
def test_without_a_cache_nothing_is_left_of_the_library_once_it_is_loaded(
    cpp: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels.cpp").write_text(cpp)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))  # nothing can be read or written below it
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(build, "loaded", {})
    source = build.step_kernels()._replace(path=tmp_path / "kernels.cpp")
    build.load_kernels.cache_clear()
    try:
        assert build.load_kernels(source).one() == 1
    except build.KernelsUnavailableError:
        assert cpp == "not C++"
    finally:
        build.load_kernels.cache_clear()
    assert not list((tmp_path / "temporary").iterdir())


def test_a_compiler_that_fails_is_named_with_its_first_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "kernels.cpp"
    broken.write_text("not C++")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.load_kernels.cache_clear()
    try:
        with pytest.raises(build.KernelsUnavailableError, match=r"cannot compile the kernels: .*error"):
            build.load_kernels(build.step_kernels()._replace(path=broken))
        assert not list((tmp_path / "cache").rglob("*.so"))
    finally:
        build.load_kernels.cache_clear()


def test_where_triton_does_not_run_layers_on_cuda_are_pytorchs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layers, "_on_cuda", None)
    monkeypatch.setitem(sys.modules, "engine.native.fused", None)
    monkeypatch.delattr(native, "fused", raising=False)
    cuda = torch.device("cuda")
    use_layer_kernels(cuda, "torch")
    assert "Triton" not in capsys.readouterr().out
    use_layer_kernels(cuda, "auto")
    said = capsys.readouterr()
    assert "Triton does not run" in said.out + said.err
    assert layers._on_cuda is None
