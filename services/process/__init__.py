"""Parts of a worker process without knowledge of roles: engine thread, HTTP, metrics, drain, watchdog, request owners.

May import engine, broker and common, but no other room of services.
"""
