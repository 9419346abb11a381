"""Commands of `triptych`, their options, and all output for a person.

A command imports heavy modules inside its function, so that help is quick. Not here: processes and their supervision
(launch.cluster). May import launch.cluster, services, proxy, broker and common; `app` alone imports the demo, and
launch.terminal's commands.
"""
