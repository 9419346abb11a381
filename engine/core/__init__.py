"""Engines of decoder and encoder, and the loop around a step: request checks, decoding, output, statistics.

Here an input becomes an output: requests, offers and tensors in, one list of messages out of each step. No network.
The top floor of the engine under `engine.llm`: may import every other room of the engine.
"""
