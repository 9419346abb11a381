"""Files to ask about, with known answers: `triptych samples` writes the files, `triptych demo --keep` its own pictures.

The recording is a sentence of Jane Austen's *Sense and Sensibility*, read for LibriVox (public domain), from Debian's
package `pocketsphinx-testdata`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from common.errors import invalid

FILES: Final = Path(__file__).parent / "files"
MEANING: Final = {
    "sign.png": "a sign that says CAFE",
    "speech.flac": 'a voice that says "he might even have been made amiable himself"',
    "number.txt": "a number in words, 1204",
}
_CHAT: Final = (
    """-H 'content-type: application/json' -d '{"max_tokens": 16, "messages": [{"role": "user", "content": ["""
    """{"type": "image_url", "image_url": {"url": "data:image/png;base64,'"$(base64 < SIGN | tr -d "\\n")"'"}}, """
    """{"type": "text", "text": "What does the sign say?"}]}]}'"""
)
_COMPLETION: Final = """-H 'content-type: application/json' -d '{"max_tokens": 16, "prompt": "'"$(cat NUMBER)"'"}'"""


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by name into a folder, made if need be.

    Raises TriptychError("invalid_request") where the folder cannot be written, or has another file of a name.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            if (folder / name).exists() and (folder / name).read_bytes() != data:
                raise invalid(f"{folder / name} exists already, with other contents: name another folder", "folder")
        for name, data in files.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise invalid(f"cannot write into {folder}: {error.strerror}; name another folder", "folder") from error


def write_samples(folder: Path, base_url: str) -> str:
    """Write the samples; return a text with the meaning of each, and commands that ask the API at `base_url`.

    Raises TriptychError("invalid_request") as `write_files` does.
    """
    write_files(folder, {name: (FILES / name).read_bytes() for name in MEANING})
    sign, speech, number = (shlex.quote(str(folder / name)) for name in MEANING)
    meanings = [f"{folder / name}: {meaning}" for name, meaning in MEANING.items()]
    return "\n".join(
        [
            *meanings,
            "",
            "Ask a model that sees (triptych serve signpost):",
            f'  triptych request {sign} --prompt "What does the sign say?"',
            f"  curl -s {base_url}/v1/chat/completions {_CHAT.replace('SIGN', sign)}",
            "A model that hears (triptych serve openai/whisper-base):",
            f"  triptych request {speech}",
            f"  curl -s {base_url}/v1/audio/transcriptions -F file=@{speech}",
            "A model that reads (triptych serve numerals):",
            f'  triptych request --prompt "$(cat {number})"',
            f"  curl -s {base_url}/v1/completions {_COMPLETION.replace('NUMBER', number)}",
        ]
    )
