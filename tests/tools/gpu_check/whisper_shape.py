"""Whisper large-v3 by its shape, for tests of what large models need."""

from __future__ import annotations

from tools.gpu_check.shapes import EOS_TOKEN_ID, Shape


def whisper_large_v3(*, toy: bool = False) -> Shape:
    """Whisper large-v3."""
    layers, heads, width, ffn = (2, 2, 32, 48) if toy else (32, 20, 1280, 5120)
    num_mel_bins = 16 if toy else 128
    config = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": "bfloat16",
        "vocab_size": 512 if toy else 51866,
        "num_mel_bins": num_mel_bins,
        "d_model": width,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": ffn,
        "decoder_ffn_dim": ffn,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "decoder_start_token_id": 391,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 391,
        "bos_token_id": 391,
    }
    preprocessor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": num_mel_bins,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 30,
    }
    return Shape("Whisper large-v3" if not toy else "a toy of Whisper", config, preprocessor)
