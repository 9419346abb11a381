"""Parts of a worker process that know no role: engine thread, HTTP, metrics, drain, watchdog, owners of requests.

May import engine, broker and common, but no other room of services.
"""
