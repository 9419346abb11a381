"""Facts from the plain JSON files of a model folder, read by every process without torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgspec

from common.errors import TriptychError, closest, invalid
from common.families import Family, MediaKind, find_family
from common.quantisation import Quantisation, read_quantisation
from common.sampling_params import SamplingParams

_SIZES: Final = re.compile(
    r"(vocab|hidden|intermediate|patch)_size|head_dim|d_(model|ff|kv)|n(um)?_(heads|layers|positions|mel_bins)|"
    r"num_(hidden_layers|attention_heads|key_value_heads)|(encoder|decoder)_(layers|attention_heads|ffn_dim)|"
    r"max_((source|target)_positions|position_embeddings)|sliding_window"
)
_KINDS: Final[tuple[tuple[re.Pattern[str], Any, str], ...]] = (
    (_SIZES, int, "a positive whole number"),
    (re.compile(r"\w+_token_(id|index)"), (int, list), "a whole number"),
    (re.compile(r"\w+_(eps|theta)"), (int, float), "a number"),
    (re.compile(r"model_type"), str, "a string"),
    (re.compile(r"architectures|(begin_)?suppress_tokens|bad_words_ids"), list, "a list"),
    (re.compile(r"(text|vision|audio|quantization)_config|rope_(parameters|scaling)"), dict, "an object"),
)
"""Keys of JSON files, the types of their values, and the same in words; null is always right."""
_PER_STAGE: Final = ("num_heads", "patch_size")
"""Sizes that may be lists: DaViT (Florence-2) has others in each of its stages."""
_RECOMMENDED: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling of generation_config.json that holds for requests without their own values."""
_AGAIN: Final = ("consolidated*", "model.fp*")
"""Files with the same weights once more, for other programs or in float32 (Mistral, Whisper large-v3)."""
_END_BYTES: Final = 64 * 2**10
_SAMPLE_BYTES: Final = 4 * 2**10
_NUM_SAMPLES: Final = 64
CONFIG_OF_ADAPTERS: Final = "adapter_config.json"
BUNDLED = Path(__file__).parent / "bundled"
_LARGE_7B: Final = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
_LLAMA: Final = {
    **_LARGE_7B,
    "vocab_size": 32_000,
    "intermediate_size": 11_008,
    "max_position_embeddings": 2048,
    "rope_theta": 1e4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN2: Final = {
    **_LARGE_7B,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e4,
}
_GEMMA3: Final = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_QWEN2_VL: Final = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
TEXT_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "gemma3_text": _GEMMA3,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "mllama_text_model": {
        **_LLAMA,
        "vocab_size": 128_256,
        "intermediate_size": 14_336,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
        "pad_token_id": 128_004,
    },
    "qwen3_vl_text": {**_QWEN2, "head_dim": 128, "max_position_embeddings": 128_000, "rope_theta": 5e5},
}
"""Defaults of transformers' configuration classes, by `model_type` of the decoder, for keys missing in config.json.

Published folders leave out the defaults: LLaVA-1.5 and Qwen2-Audio do not even name their number of layers. The table
stands here because transformers is slow to import; a test compares both."""


def resolve_model(model: str) -> Path:
    """The folder of a model: a bundled name, a folder, or a hub id (downloaded, or found in the local hub cache).

    Raises TriptychError("model_not_found") saying what was tried.
    """
    if (BUNDLED / model / "config.json").is_file():
        return BUNDLED / model
    if (Path(model) / "config.json").is_file():
        return Path(model).resolve()
    if Path(model).exists():
        raise TriptychError("model_not_found", f"{model!r} is not a model folder: it has no config.json", "model")
    if not is_hub_id(model):
        bundled = sorted(path.name for path in BUNDLED.iterdir() if (path / "config.json").is_file())
        is_path = model.startswith((".", "/", "~")) or model.count("/") > 1
        names = f"neither a folder, nor a hub id (owner/name), nor {', '.join(bundled)}"
        found = f"{'the folder does not exist' if is_path else names}{closest(model, bundled)}"
        raise TriptychError("model_not_found", f"cannot find the model {model!r}: {found}", "model")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
        return Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=[*_AGAIN, "*/*.safetensors"]))
    except Exception as error:  # the hub client raises many kinds
        message = f"{model!r} is no folder here, and cannot be got from the hub: {' '.join(str(error).split())}"
        if isinstance(error, LocalEntryNotFoundError):
            message = f"{model!r} is no folder here, not in the hub's cache either, and the hub cannot be reached: "
            message += f"check the network and HF_HUB_OFFLINE, or `hf download {model} --local-dir FOLDER` elsewhere"
        raise TriptychError("model_not_found", message, "model") from error


def hub_folder(model: str) -> Path | None:
    """Return the folder of a hub id in the local cache; None for a name that is none, or has to be downloaded."""
    if not is_hub_id(model):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def is_hub_id(model: str) -> bool:
    """Return whether a name can only be `owner/name` of the hub."""
    return model.count("/") == 1 and not model.startswith((".", "/", "~")) and not Path(model).exists()


@dataclass(frozen=True)
class ModelInfo:
    """A model folder, read once. `config` and `generation` are the unchanged JSON files.

    `preprocessor` are the settings for images or audio: of processor_config.json, else of preprocessor_config.json.
    `adapters` are the folders of the LoRA adapters served with the model, by name.
    """

    folder: Path
    name: str
    architecture: str
    family: Family
    config: dict[str, Any] = field(repr=False)
    generation: dict[str, Any] = field(repr=False)
    preprocessor: dict[str, Any] = field(repr=False)
    adapters: Mapping[str, Path] = field(default_factory=dict)

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """The decoder's part of the config with defaults filled in; older checkpoints keep this part at the top."""
        nested: dict[str, Any] = self.config.get("text_config") or {}
        return JsonObject({**text_defaults(self.config), **self.config, **nested})

    @cached_property
    def quantisation(self) -> Quantisation | None:
        """How the weights are quantised; None for plain ones."""
        return read_quantisation(self.config, self.name)

    @cached_property
    def is_encoder_decoder(self) -> bool:
        return self.family.is_encoder_decoder

    @cached_property
    def has_cross_attention(self) -> bool:
        return self.family.cross_attention

    @cached_property
    def media_kind(self) -> MediaKind | None:
        """The kind of media for the encoder; None for a text-only model."""
        return self.family.media_kind

    @cached_property
    def media_kinds(self) -> tuple[MediaKind, ...]:
        """All kinds of media for the encoder."""
        kind = self.family.media_kind
        return () if kind is None else (kind, "video") if self.family.video else (kind,)

    @cached_property
    def max_model_len(self) -> int:
        config, key, default = self.text_config, self.family.decoder_length, self.family.default_length
        return default if default is not None and config.get(key) is None else int(config[key])

    @cached_property
    def max_encoder_tokens(self) -> int:
        """Most rows in the encoder output of an input."""
        if self.family.encoder_tiles:
            vision = self.config["vision_config"]
            side = int(vision.get("image_size", 448)) // int(vision.get("patch_size", 14))
            return int(vision.get("max_num_tiles", 4)) * (side**2 + 1)
        key = self.family.encoder_length
        return int(self.config[key]) if key else self.max_model_len

    @cached_property
    def vocab_size(self) -> int:
        return int(self.text_config["vocab_size"])

    @cached_property
    def placeholder_token_id(self) -> int | None:
        """The token in place of each media item of a rendered prompt; None for models without placeholders."""
        key = self.family.placeholder
        newer = key.replace("_index", "_id")
        return int(self.config[newer if newer in self.config else key]) if key else None

    @cached_property
    def placeholders(self) -> dict[int, MediaKind]:
        """The tokens in place of media items of a rendered prompt, with the kinds of media."""
        tokens = ((self.placeholder_of(kind), kind) for kind in self.media_kinds)
        return {token: kind for token, kind in tokens if token is not None}

    def placeholder_of(self, kind: MediaKind) -> int | None:
        """The token in place of an item of this kind; None for models without placeholders."""
        if kind == "video" and self.family.frames_as_images:
            return self.vocab_size
        return int(self.config["video_token_id"]) if kind == "video" else self.placeholder_token_id

    def row_token_of(self, kind: MediaKind) -> int | None:
        """The token in place of each encoder row of an item of this kind, once the prompt is expanded."""
        return self.placeholder_token_id if self.family.frames_as_images else self.placeholder_of(kind)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        outer, inner = self.config.get("eos_token_id"), self.text_config.get("eos_token_id")
        value = self.generation.get("eos_token_id", inner if outer is None else outer)
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (int(value),)

    def sampling_defaults(self, source: str) -> dict[str, Any]:
        """Return fields of `SamplingParams`: those of generation_config.json for the source "auto", none for "none".

        Raises TriptychError: "model_not_found" for an impossible value, "invalid_request" for another source.
        """
        if source == "none":
            return {}
        if source != "auto":
            raise invalid(f"generation_config is 'auto' or 'none', not {source!r:.80}", "generation_config")
        given = {name: self.generation[name] for name in _RECOMMENDED if self.generation.get(name) is not None}
        try:
            params = msgspec.convert(given, SamplingParams).validate()
        except (msgspec.ValidationError, TriptychError) as error:
            message = f"cannot use {self.folder}/generation_config.json: {error}; mend it, or --generation-config none"
            raise TriptychError("model_not_found", message, "model") from error
        return {name: getattr(params, name) for name in given}

    @property
    def fingerprint(self) -> str:
        """Equal for equal models and adapters: configuration, and names, sizes and samples of the weight files.

        Of a big file some 400 KiB from all over it are read, so that this takes milliseconds for any model: another
        training shows, and so does damage to more than a sixtieth of the file; a smaller one may not.
        """
        digest = hashlib.blake2b(json.dumps(self.config, sort_keys=True).encode(), digest_size=12)
        _hash_weights(self.folder, digest)
        for name in sorted(self.adapters):
            digest.update(f"{name} {self.adapter_fingerprint(name)}".encode())
        return digest.hexdigest()

    def adapter_fingerprint(self, name: str) -> str:
        """Equal for equal adapters. Raises OSError for files that cannot be read."""
        folder = self.adapters[name]
        digest = hashlib.blake2b((folder / CONFIG_OF_ADAPTERS).read_bytes(), digest_size=12)
        _hash_weights(folder, digest)
        return digest.hexdigest()


def load_model_info(model: str, lora_modules: Sequence[str] = ()) -> ModelInfo:
    """Read a model's JSON files; its adapters are given as the setting `lora_modules` is.

    Raises TriptychError("model_not_found") for an unknown model, a broken file, an architecture that is not supported,
    and weights quantised in a way that is not; "invalid_request" for adapters that do not exist, or cannot be served.
    """
    folder = resolve_model(model)
    name = folder.name if Path(model).exists() else model
    config = read_json(folder / "config.json")
    architecture = str([*(config.get("architectures") or ()), "(none given)"][0])
    family = find_family(architecture)
    read_quantisation(config, name)  # refuses what is not supported
    part = "feature_extractor" if family.media_kind == "audio" else "image_processor"
    nested = read_json(folder / "processor_config.json").get(part)
    generation, preprocessor = (read_json(folder / f"{kind}_config.json") for kind in ("generation", "preprocessor"))
    adapters = _find_adapters(lora_modules)
    if adapters and family.cross_attention:
        raise invalid(f"{name} has cross-attention: LoRA adapters are for decoders without it", "lora_modules")
    return ModelInfo(folder, name, architecture, family, config, generation, nested or preprocessor, adapters)


def _find_adapters(modules: Sequence[str]) -> dict[str, Path]:
    """Return the folders of adapters by name, from `name=folder`, or `folder`, which has the name then."""
    found: dict[str, Path] = {}
    for module in modules:
        name, path = module.split("=", 1) if "=" in module else ("", module)
        folder = Path(path).resolve()
        name = name or folder.name
        if not (folder / CONFIG_OF_ADAPTERS).is_file():
            message = f"the adapter {name!r}: {folder} has no {CONFIG_OF_ADAPTERS}; give folders saved by PEFT"
            raise invalid(message, "lora_modules")
        if name in found:
            raise invalid(f"two adapters have the name {name!r}: give name=folder", "lora_modules")
        found[name] = folder
    return found


def text_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the defaults for a config.json, nested or flat; empty for a decoder outside of the table."""
    nested = config.get("text_config") or {}
    kind = nested.get("model_type") or config.get("model_type") or ""
    return TEXT_DEFAULTS.get(kind) or TEXT_DEFAULTS.get(f"{kind}_text") or {}


class JsonObject(dict[str, Any]):
    """An object of a model's JSON file. A missing key raises TriptychError with a sentence."""

    def __missing__(self, key: str) -> Any:
        raise TriptychError("model_not_found", f"the configuration of the model has no {key!r}", "model")


def _checked(content: dict[str, Any]) -> JsonObject:
    """Return an object of a JSON file. Raises ValueError naming a key of `_KINDS` with a value of another type."""
    for key, value in content.items():
        values = value if key in _PER_STAGE and isinstance(value, list) else [value]
        for keys, types, words in _KINDS:
            wrong = any(not isinstance(one, types) or (keys is _SIZES and one < 1) for one in values)
            if wrong and value is not None and keys.fullmatch(key):
                raise ValueError(f"{key} is {value!r:.80}, not {words}")
    return JsonObject(content)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file, empty if the file does not exist.

    Raises TriptychError("model_not_found") for a file that holds no JSON object, or a known key of another kind.
    """
    try:
        content = json.loads(path.read_text(), object_hook=_checked) if path.is_file() else {}
    except (ValueError, OSError) as error:
        raise TriptychError("model_not_found", f"cannot read {path}: {error}", "model") from error
    if not isinstance(content, dict):
        raise TriptychError("model_not_found", f"{path} holds a {type(content).__name__}, not a JSON object", "model")
    return content


def _hash_weights(folder: Path, digest: hashlib.blake2b) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        if any(path.match(pattern) for pattern in _AGAIN):
            continue  # never read, and not on every host
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        _hash_samples(path, digest)


def _hash_samples(path: Path, digest: hashlib.blake2b) -> None:
    """Hash head (with the names of the tensors), tail, and blocks evenly spread between both; a small file as a
    whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= 2 * _END_BYTES + _NUM_SAMPLES * _SAMPLE_BYTES:
            digest.update(file.read())
            return
        digest.update(file.read(_END_BYTES))
        for number in range(1, _NUM_SAMPLES + 1):
            file.seek(number * size // (_NUM_SAMPLES + 1))
            digest.update(file.read(_SAMPLE_BYTES))
        file.seek(size - _END_BYTES)
        digest.update(file.read(_END_BYTES))
