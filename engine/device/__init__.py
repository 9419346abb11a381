"""Devices: choice, memory budgets and their measurement, copies to and from the host.

Not here: the tensors of a model. Imports nothing of the engine.
"""
