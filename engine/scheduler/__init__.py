"""Scheduling: the tokens of a decoder step, the items of an encoder batch, and the capacity for both.

May import engine.cache, processors, state and device. Forward passes are in engine.runner.
"""
