"""One worker without a network: models, attention, caches, scheduler, sampling, and the engines around them.

Not here: processes and asyncio (services), channels and transports (broker). May import common. Floors, downwards:
llm, core, handoff, runner and scheduler, cache and encoders and sampling, attention and models, native and processors,
device and media and state.
"""
