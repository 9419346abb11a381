"""Engines of decoder and encoder, and the loop around a step: request checks, decoding, output, statistics.

The top floor of the engine under `engine.llm`: may import every other room of the engine. No network.
"""
