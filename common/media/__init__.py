"""Media containers (MP4, WebM, AAC, MPEG, Matroska) by FFmpeg's libraries: format check, limits, samples.

Belongs here: the opening of untrusted files that the proxy and the encoders must treat alike. Does not: models' inputs
(engine.processors). Call from a limited child only. May import the modules beside this folder; imports PyAV.
"""
