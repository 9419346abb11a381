"""The handoff as the engine sees it: reception of encoder outputs and KV, export of KV, checks of offers.

No network and no threads: those are in services.handoff. May import engine.scheduler, cache, state and device.
"""
