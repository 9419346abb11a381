"""An OpenAI server that answers by what the prompt says, and notes what it was sent."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse


class FakeApi:
    """`fail` in a prompt: HTTP 400; `cut`: the stream ends early; `hang`: no answer; `drip`: one without an end;
    `hundred`: no conversation; a JSON object: that as the first event; else it is `the answer`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.uploads: list[tuple[str, str, int]] = []
        self.in_flight = self.most_in_flight = 0
        self.hanging = threading.Event()
        self.key: str | None = None
        app = FastAPI()
        app.get("/v1/models")(self._models)
        app.post("/v1/chat/completions")(self._chat)
        app.post("/v1/completions")(self._complete)
        app.post("/v1/audio/transcriptions")(self._transcribe)
        self._server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=0))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def forget(self) -> None:
        """Forget what was sent, how many were in flight, and that one hung."""
        self.bodies.clear()
        self.uploads.clear()
        self.most_in_flight = 0
        self.hanging.clear()

    def __enter__(self) -> FakeApi:
        self._thread.start()
        for _ in range(500):
            if self._server.started:
                break
            self._thread.join(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    @property
    def url(self) -> str:
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    async def _models(self, request: Request) -> Response:
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no"}}, status_code=401)
        return JSONResponse({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        content = body["messages"][-1]["content"]
        prompt = content if isinstance(content, str) else content[-1]["text"]
        if "hundred" in prompt:
            error = {"message": "fake holds no conversations: use /v1/completions"}
            return JSONResponse({"error": error}, status_code=400)
        if "fail" in prompt:
            error = {"message": "messages: this prompt asks for failure", "type": "invalid_request_error"}
            return JSONResponse({"error": error}, status_code=400)
        return StreamingResponse(self._stream(prompt), media_type="text/event-stream")

    async def _complete(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        events = ({"text": "1204", "finish_reason": None}, {"text": "", "finish_reason": "stop"})
        return StreamingResponse(iter([_event({"choices": [event]}) for event in events]))

    async def _stream(self, prompt: str) -> AsyncIterator[str]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if prompt.startswith("{"):
                yield f"data: {prompt}\n\n"
                if json.loads(prompt).get("error"):
                    return
            for piece in ("the ", "answer"):
                yield _event({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
                if "cut" in prompt:
                    return
                if "hang" in prompt:
                    self.hanging.set()
                    await asyncio.sleep(60)
                while "drip" in prompt:
                    yield _event({"choices": [{"index": 0, "delta": {"content": "."}, "finish_reason": None}]})
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.01)
            yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            yield _event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}})
            yield "data: [DONE]\n\n"
        finally:
            self.in_flight -= 1

    async def _transcribe(self, request: Request) -> Response:
        form = await request.form()
        upload = form["file"]
        assert not isinstance(upload, str)
        self.uploads.append((upload.filename or "", upload.content_type or "", len(await upload.read())))
        done = {"text": "spoken words", "usage": {"type": "tokens", "output_tokens": 4}}
        if "one piece" in form.get("prompt", ""):
            return JSONResponse(done)
        events = [{"type": "transcript.text.delta", "delta": piece} for piece in ("spoken", " words")]
        stream = [_event(event) for event in (*events, {"type": "transcript.text.done", **done})]
        return StreamingResponse(iter(stream), media_type="text/event-stream")


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps({'id': 'chatcmpl-1', **body})}\n\n"
