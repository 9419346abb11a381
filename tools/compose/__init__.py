"""What `make compose-test` runs: a Docker engine if there is none, and the checks of a cluster in containers."""
