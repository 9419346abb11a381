"""The encode stage: from media to encoder outputs in place at the receiver.

EncodeStage owns requests and attempts, EncodeJob one item, EncodeDedup equal items, PreprocessPool processes and memory
of preprocessing, OutputSink the destination.
Not here: the arithmetic (engine.core.encoder_engine) and the wire (broker.handoff).
May import services.handoff, services.worker_context and services.process, and the floors below services.
"""
