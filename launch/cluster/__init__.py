"""A cluster on a single machine: planned, started, supervised, found again by other commands.

Belongs here: topology, shares of memory and cores, child processes. Does not: output, except through a `Reporter`. May
import services, broker and common; of the engine, checkpoints alone (engine.models).
"""
