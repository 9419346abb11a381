"""Which kernels of FlashInfer are built ahead for which models."""

from __future__ import annotations

import itertools
import pkgutil
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from common.model_info import BUNDLED, load_model_info
from engine.attention.flashinfer import served
from engine.attention.flashinfer.served import needs_tensor_cores, unserved
from engine.device.choice import DTYPES as engine_dtypes
from engine.state.spec import HeadSpec
from tests import tiny_models
from tests.gpu.conftest import OWN_MAKERS
from tests.gpu.test_engine import DTYPES
from tests.tiny import gemma3, text
from tests.tools.gpu_check.whisper_shape import whisper_large_v3
from tools.gpu_check.cases import CASES, AttentionCase
from tools.gpu_check.kernels import Kernel, _specification, check_kernels, main, needed_kernels, served_kernels
from tools.gpu_check.shapes import qwen2_5_vl_3b

NO_LIBRARY = MagicMock()


def sizes_of(kernel: Kernel) -> tuple[Any, ...]:
    """As a plan of FlashInfer's wrappers names them."""
    dtype = engine_dtypes[kernel.dtype]
    return (dtype, dtype, dtype, torch.int32, kernel.head_dim, kernel.head_dim, 0, kernel.window, False)


def load(function: str, *args: Any) -> None:
    """Call a function that FlashInfer keeps the results of, anew."""
    pkgutil.resolve_name(f"flashinfer.{function}").__wrapped__(*args)


LOADERS = {
    "page": lambda _: load("page:get_page_module"),
    "sampling": lambda _: load("sampling:get_sampling_module"),
    "quantization": lambda _: load("quantization.packbits:get_quantization_module"),
    "decode": lambda kernel: load("decode:get_batch_decode_module", *sizes_of(kernel)),
    "prefill": lambda kernel: load("prefill:get_batch_prefill_module", "fa2", *sizes_of(kernel), False),
}
PAGE, SAMPLING = Kernel("page"), Kernel("sampling")


def needed(folder: Path, dtype: str = "bfloat16") -> list[Kernel]:
    return needed_kernels([load_model_info(str(folder))], dtype)


def test_small_groups_are_decoded_without_tensor_cores_and_large_ones_with(tmp_path: Path) -> None:
    whisper = needed(whisper_large_v3().write(tmp_path / "whisper"))
    assert whisper == [PAGE, SAMPLING, Kernel("decode", "bfloat16", 64), Kernel("prefill", "bfloat16", 64)]
    qwen = needed(qwen2_5_vl_3b().write(tmp_path / "qwen"), "float16")  # groups of eight; vision heads of 80 have none
    assert qwen == [PAGE, SAMPLING, Kernel("prefill", "float16", 128)]


def test_windows_are_kernels_of_their_own(tmp_path: Path) -> None:
    folder = text.make_mistral(tmp_path, head_dim=64, sliding_window=8)
    assert needed(folder) == [
        PAGE,
        SAMPLING,
        Kernel("decode", "bfloat16", 64, True),
        Kernel("prefill", "bfloat16", 64, True),
    ]


def test_models_that_mask_need_the_library_that_packs_the_bits(tmp_path: Path) -> None:
    """Gemma 3: the tokens of an image see each other in both directions."""
    assert Kernel("quantization") in needed(gemma3.make_gemma3(tmp_path / "images", head_dim=64))
    assert Kernel("quantization") not in needed(gemma3.make_gemma3_text(tmp_path / "text", head_dim=64))


def test_heads_that_are_not_served_need_none_for_attention_and_are_listed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd, even = tiny_models.make_llama(tmp_path / "odd"), tiny_models.make_llama(tmp_path / "even", head_dim=64)
    assert needed(odd) == [SAMPLING]
    assert main(["--list", str(odd), str(even), str(even)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "page",
        "sampling",
        "decode bfloat16 heads of 64",
        "prefill bfloat16 heads of 64",
    ]


def test_those_of_the_check_are_listed_by_its_cases_of_attention(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed == list(map(str, check_kernels()))
    assert listed[:3] == ["page", "sampling", "quantization"]
    assert {"decode bfloat16 heads of 128", "prefill bfloat16 heads of 64 in a window"} < set(listed)
    served = [case for case in CASES if case.head_dim != 80 and case.dtype != "float32"]
    assert {f"prefill {case.dtype} heads of {case.head_dim}" for case in served} < set(listed)


def test_every_kind_of_heads_that_is_served_is_a_case_of_the_check() -> None:
    cases = [case for case in CASES if unserved(heads_of(case), engine_dtype(case)) is None]
    found = {(case.dtype, case.head_dim) for case in cases}
    dtypes = {str(dtype).removeprefix("torch.") for dtype in served.DTYPES}
    assert found == set(itertools.product(dtypes, served.HEAD_DIMS))
    for dtype, head_dim in found:
        own = [heads_of(case) for case in cases if (case.dtype, case.head_dim) == (dtype, head_dim)]
        if dtype == "bfloat16":
            assert {needs_tensor_cores(one.num_heads, one.num_kv_heads) for one in own} == {True, False}
    groups = {case.num_heads // case.num_kv_heads for case in cases}
    assert {*served.SMALL_GROUPS, max(served.SMALL_GROUPS) + 1, served.MAX_GROUP} <= groups


def test_what_is_built_ahead_for_the_check_is_still_twenty_two_libraries() -> None:
    assert len(check_kernels()) == 22


def test_an_image_holds_the_kernels_of_all_heads_and_so_those_of_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--served", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == list(map(str, served_kernels()))
    assert set(check_kernels()) < set(served_kernels())
    assert len(served_kernels()) == 3 + 2 * 2 * len(served.HEAD_DIMS) * len(served.DTYPES)


@pytest.mark.parametrize("kernel", served_kernels(), ids=str)
def test_a_kernel_is_the_library_that_the_real_package_loads(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("flashinfer.jit.core", exc_type=ImportError)
    asked: list[str] = []
    monkeypatch.setattr(core.JitSpec, "build_and_load", lambda spec: asked.append(spec.name) or NO_LIBRARY)
    monkeypatch.setattr("flashinfer.utils.register_custom_op", lambda *_, **__: lambda function: function)
    LOADERS[kernel.kind](kernel)
    assert asked == [_specification(kernel).name]


def heads_of(case: AttentionCase) -> HeadSpec:
    return HeadSpec(case.num_heads, case.num_kv_heads, case.head_dim)


def engine_dtype(case: AttentionCase) -> torch.dtype:
    return engine_dtypes[case.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_model_of_the_check_needs_another_one(dtype: str, tmp_path: Path) -> None:
    folders = [BUNDLED / "signpost", *(make(tmp_path / name) for name, make in OWN_MAKERS.items())]
    if dtype == "bfloat16":  # the dtype of the benchmarks
        shapes = (qwen2_5_vl_3b(), whisper_large_v3())
        folders += [shape.write(tmp_path / str(number)) for number, shape in enumerate(shapes)]
    assert set(needed_kernels([load_model_info(str(folder)) for folder in folders], dtype)) <= set(check_kernels())


def test_it_asks_which_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--list"])
    assert "Name models, --check or --served" in capsys.readouterr().err
