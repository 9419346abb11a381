"""`make helm-test`: the chart of launch/kubernetes rendered, held to the schemas of its objects, and run as pods.

Runs in an environment of its own (test.sh makes it): `check` needs kubernetes-validate and models of custom resources.
Does not belong here: the chart. Imports nothing of the project.
"""
