"""Processes are killed, stopped and cut off under load; every answer must be exact or a clean refusal, nothing left."""
