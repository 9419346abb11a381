"""Real weights behind real processes: recorded speech and a chat, as under transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.equality.cases import Case
from tests.equality.media import recording, wav
from tests.equality.references import Reference
from tests.equality.runs import expected_of
from tests.equality.served import serve

pytestmark = [pytest.mark.cluster, pytest.mark.weights]
RECORDINGS = ("dashwood.flac", "amiable.wav")
QUESTIONS = ("What is the capital of France?", "Name three colours.")
CHAT_TOKENS = 12


async def test_recorded_speech_gives_the_tokens_that_transformers_gives(whisper_tiny_en: Path, broker_url: str) -> None:
    reference = Reference(whisper_tiny_en)
    timed = {"return_timestamps": True, "force_unique_generate_call": True}  # its prompt of one token comes first
    with serve(whisper_tiny_en, broker_url, "whisper-tiny-en") as served:
        async with served.client() as client:
            create: Any = client.audio.transcriptions.create
            for name in RECORDINGS:
                media, samples = recording(name)
                options = {"model": served.info.name, "file": (name, media), "extra_body": {"return_token_ids": True}}
                plain = await create(**options)
                assert reference.strip(plain.token_ids) == reference.transcribe(samples, 80)
                assert plain.text == served.text.decode(plain.token_ids).strip()
                verbose = await create(**options, response_format="verbose_json")
                assert reference.strip(verbose.token_ids) == reference.transcribe(samples, 80, **timed)[1:]
                [segment] = verbose.segments
                assert 0 <= segment.start < 1 < verbose.duration - 1 < segment.end <= verbose.duration
                assert segment.no_speech_prob < 0.3
                assert -1 < segment.avg_logprob < 0
            silence = wav(np.full(16_000 * 3, 1e-5, np.float32))
            nothing = await create(
                model=served.info.name, file=("silence.wav", silence), response_format="verbose_json"
            )
            assert (nothing.text, nothing.segments) == ("", [])
        await served.wait_until_nothing_is_held()


async def test_chats_read_as_under_transformers(smollm2: Path, broker_url: str) -> None:
    reference = Reference(smollm2)
    with serve(smollm2, broker_url, "smollm2") as served:
        cases = []
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            prompt = served.text.render_chat(messages)
            cases.append(Case(prompt, reference.generate(prompt, CHAT_TOKENS), http={"messages": messages}))
        answers = await served.answer_all(cases, CHAT_TOKENS)
        assert [answer.token_ids for answer in answers] == expected_of(cases)
        assert [answer.text for answer in answers] == [served.text.decode(case.expected) for case in cases]
        assert "Paris" in answers[0].text
        await served.wait_until_nothing_is_held()
