"""The decoder's scheduler, its capacity, and its lookup in the caches: requests in, tokens of the next step out.

Not here: tensors, and messages to senders (engine.handoff). May import cache and state; never runner.
"""
