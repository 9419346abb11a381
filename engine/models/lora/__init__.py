"""LoRA adapters of decoders (Hu et al., 2021): PEFT's format, and the adapters that are loaded beside the weights.

Not here: which adapters there are (common.model_info). May import checkpoints, layers and the registry.
"""
