"""Commands of `triptych`, their options, and all output for a person.

A command imports heavy modules inside its function, so that help is quick. May import launch.cluster; `app` alone
imports the demo.
"""
