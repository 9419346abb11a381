"""Encoders of media and text, one module per family: transformers' own modules, run in workers that encode.

Not here: preprocessing (engine.processors), batching (engine.core). May import attention, models and the rooms below.
"""
