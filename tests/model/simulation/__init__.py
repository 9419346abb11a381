"""A whole cluster in one process: real proxy, workers and engines between a simulated network, clock and model."""
