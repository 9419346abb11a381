"""For a person at a terminal, beside `serve`: a check of the machine, logs, a chat, a live view.

Not here: measurements (launch.bench), control of workers (launch.cli.members). May import launch.cli's client and
output, launch.cluster, broker, services, engine and common.
"""
