"""The checkpoints under test."""

from tests.weights.fixtures import smollm2, whisper_tiny_en

__all__ = ["smollm2", "whisper_tiny_en"]
