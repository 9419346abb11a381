"""`triptych chat`: a conversation at the terminal, streamed; on a pipe, a question per line."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from common.errors import TriptychError
from launch.cli.client import ApiClient, ClientOptions, ClientRequest, ClientResult, Media
from launch.cli.request import load_media

HELP: Final = """  /image PATH   send a picture with the next question; several add up
  /new          forget the conversation
  /help         this list
  /exit         leave, like Ctrl-D; Ctrl-C stops an answer"""


class Chat:
    """A person's side of a conversation: reads lines, prints answers as they come."""

    def __init__(self, options: ClientOptions, system: str, lines: TextIO, out: TextIO, *, terminal: bool) -> None:
        self._options = options
        self._lines = lines
        self._out = out
        self._terminal = terminal
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, Any]] = []
        self._pictures: list[Media] = []  # go with the next question
        self._failed = False

    def run(self) -> int:
        """Talk until the input ends; return 1 if a question failed on a pipe, 0 otherwise.

        Raises TriptychError where nobody answers at the URL, and KeyboardInterrupt after Ctrl-C on a pipe.
        """
        with asyncio.Runner() as runner:
            client = ApiClient(self._options)
            try:
                model = runner.run(client.connect())
                if self._terminal:
                    self._say(f"{model} at {self._options.url} · /help · Ctrl-D leaves")
                for line in self._questions():
                    self._answer(runner, client, line)
            except BrokenPipeError:  # the reader of the answers has had enough
                return 0
            finally:
                runner.run(client.__aexit__())
        return int(self._failed and not self._terminal)

    def _questions(self) -> Iterator[str]:
        """Yield questions; carry out the commands among the lines."""
        while (line := self._read()) is not None:
            command, _, argument = line.strip().partition(" ")
            if command == "/exit":
                return
            if command == "/new":
                self._messages.clear()
                self._pictures.clear()
                self._say("a new conversation")
            elif command == "/image":
                self._attach(argument.strip())
            elif command == "/help":
                self._say(HELP)
            elif command.startswith("/") and "/" not in command[1:]:
                self._fail(f"no command {command}; there are:\n{HELP}")
            elif command:
                yield line.strip()

    def _read(self) -> str | None:
        """Return the next line, None at the end. At a terminal Ctrl-C throws a half-written line away."""
        while True:
            try:
                if self._terminal:
                    return input("> ")
                return self._lines.readline() or None
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                self._say("\nCtrl-D leaves")

    def _attach(self, path: str) -> None:
        try:
            media = load_media(Path(path).expanduser())
        except TriptychError as error:
            self._fail(error.info.message)
            return
        if media.type.startswith("audio/"):
            self._fail(f"{path} is a recording: triptych request {path} transcribes it")
            return
        self._pictures.append(media)
        self._say(f"{media.name} goes with the next question")

    def _answer(self, runner: asyncio.Runner, client: ApiClient, text: str) -> None:
        question = ClientRequest("chat", text, tuple(self._pictures), (*self._opening, *self._messages))
        pieces: list[str] = []

        def show(piece: str) -> None:
            pieces.append(piece)
            self._out.write(piece)
            self._out.flush()

        try:
            outcome = runner.run(client.send(question, show))
        except KeyboardInterrupt:
            if not self._terminal:
                raise
            self._say("\n(stopped)")
        else:
            self._out.write("\n" if pieces else "")
            if outcome.error is not None:
                self._fail(outcome.error)
                return
            self._say(_figures(outcome))
        self._messages += [question.message, {"role": "assistant", "content": "".join(pieces)}]
        self._pictures.clear()

    def _say(self, text: str) -> None:
        """Print a line that is no answer, to a person alone."""
        if self._terminal:
            self._out.write(f"\x1b[2m{text}\x1b[0m\n" if self._out.isatty() else f"{text}\n")
            self._out.flush()

    def _fail(self, text: str) -> None:
        self._failed = True
        self._out.flush()
        print(f"error: {text}", file=sys.stderr, flush=True)


def run_chat(options: ClientOptions, system: str) -> int:
    """Chat over standard input and output. Returns and raises as `Chat.run`."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # lets `input` edit lines and recall former ones
    return Chat(options, system, sys.stdin, sys.stdout, terminal=terminal).run()


def _figures(outcome: ClientResult) -> str:
    first = f" · first after {1000 * outcome.ttft_s:.0f} ms" if outcome.ttft_s is not None else ""
    rate = f" · {outcome.tokens_per_s:.1f} tokens/s" if outcome.tokens_per_s is not None else ""
    return f"{outcome.completion_tokens or 0} tokens{first}{rate}"
