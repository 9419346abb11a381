"""Forward passes of a decoder: input arrays, recorded graphs, copies between blocks, and memory measured at start.

Not here: the choice of requests (engine.scheduler). May import cache, sampling, attention, models and the rooms below.
"""
