"""Handoff decisions of one engine: offers are checked, memory is reserved, KV is exported and received.

Not here: asyncio (services.handoff) and channels (broker.handoff). May import scheduler, runner and the rooms below.
"""
