"""adapter_config.json as PEFT writes it, told without torch and without PEFT."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common.model_info import CONFIG_OF_ADAPTERS, read_json
from engine.models.checkpoint_index import CheckpointError

ADAPTER_STEM: Final = "adapter_model"
"""Of the file with the weights."""
_UNSUPPORTED: Final = (
    *("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication", "lora_bias"),
    *("use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config"),
)
_PLAIN_STARTS: Final = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights with which the weights of the model stay as they are."""


def adapter_error(name: str, what: str) -> CheckpointError:
    """Return the error of an adapter that cannot be served."""
    kinds = "LoRA by PEFT, of the linear layers of a decoder's attention and MLP"
    return CheckpointError(f"the adapter {name!r} {what}; supported: {kinds}")


@dataclass(frozen=True)
class LoraConfig:
    """The factors of an adapter: of each layer `alpha` / r, or / sqrt(r) with `rslora` (Kalajdzievski, 2023).

    `alpha_pattern` has the alphas of some layers, by a regular expression for the end of the layer's name.
    """

    alpha: float
    alpha_pattern: Mapping[str, float]
    rslora: bool

    def factor(self, layer: str, rank: int) -> float:
        """Return the factor of a layer, whose name is the trained model's."""
        own = (alpha for key, alpha in self.alpha_pattern.items() if re.match(rf"(.*\.)?({key})$", layer))
        return next(own, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def read_lora_config(name: str, folder: Path) -> LoraConfig:
    """Read an adapter's configuration. Raises CheckpointError naming what is missing, wrong or not supported."""
    config = read_json(folder / CONFIG_OF_ADAPTERS)
    asked = [key for key in _UNSUPPORTED if config.get(key)]
    asked += ["peft_type"] if config.get("peft_type") != "LORA" else []
    asked += ["bias"] if config.get("bias", "none") != "none" else []
    asked += ["init_lora_weights"] if config.get("init_lora_weights") not in _PLAIN_STARTS else []
    if asked:
        raise adapter_error(name, f"has {asked[0]} = {config.get(asked[0])!r:.80}, which is not supported")
    try:
        pattern = {key: float(alpha) for key, alpha in (config.get("alpha_pattern") or {}).items()}
        found = LoraConfig(float(config["lora_alpha"]), pattern, bool(config.get("use_rslora")))
        found.factor("", 1)  # the expressions can be read
    except (KeyError, ValueError, TypeError, AttributeError, re.error) as error:
        raise adapter_error(name, f"has a lora_alpha or an alpha_pattern that cannot be read ({error!r})") from error
    return found
