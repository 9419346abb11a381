"""Text in and out of tokens: prompts, chat templates, detokenising, Whisper's decoder prompts.

Belongs here: conversions that `LLM` and the proxy must make alike. Does not: HTTP fields (proxy.api), sampling
(engine). May import the modules beside this folder, never torch.
"""
