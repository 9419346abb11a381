"""The bundled model's sign, as suites show it and read it."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel

URL: Final = os.environ["SIGNS_URL"] + "/v1"
QUESTION: Final = "What colour is the sign?"
PICTURE: Final = (Path(os.environ["CHECKOUT"]) / "docs/images/sign.png").read_bytes()
PICTURE_URL: Final = "data:image/png;base64," + base64.b64encode(PICTURE).decode()


class Sign(BaseModel):
    colour: Literal["red", "green", "blue", "yellow", "orange", "purple", "white", "black"]
