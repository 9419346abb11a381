"""The operating system's side of a process: memory, clocks, helper processes with limits.

Belongs here: code that knows Linux and the C library, not what the process serves. May import the modules beside this
folder.
"""
