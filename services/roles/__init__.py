"""Services of the roles: encoder, prefill, and the decoders; `factory` makes the service of a role.

Not here: the encode stage (services.encode), both ends of a handoff (services.handoff), computation (engine).
May import services.encode, services.handoff, services.worker_context and services.process, and the floors below
services.
"""
