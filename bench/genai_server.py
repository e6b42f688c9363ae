"""A minimal server of onnxruntime-genai's engine: streamed /v1/completions.

    python bench/genai_server.py MODEL_DIR --port PORT --max_batch_size 16

On CPU that engine batches the requests that wait when a batch begins. Later ones wait until the
batch has ended. Answers are greedy, and all have `max_tokens` tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class Completion:
    """A prompt, and the queue of its tokens from the engine's thread; None ends them."""

    prompt: np.ndarray
    max_tokens: int
    loop: asyncio.AbstractEventLoop
    tokens: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)

    def tell(self, token: int | None) -> None:
        self.loop.call_soon_threadsafe(self.tokens.put_nowait, token)


class Loop(threading.Thread):
    """Thread that runs the engine."""

    def __init__(self, directory: Path, max_batch_size: int) -> None:
        super().__init__(daemon=True)
        config = og.Config(str(directory))
        config.overlay(json.dumps({"engine": {"static_batching": {
            "max_batch_size": max_batch_size}}}))
        self.model = og.Model(config)
        self.tokenizer = og.Tokenizer(self.model)
        self.completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()

    def run(self) -> None:
        engine = og.Engine(self.model)
        events, running = engine.create_event_buffer(256), {}
        while True:
            while not running or not self.completions.empty():
                completion = self.completions.get()
                request = engine.create_request()
                options = og.TurnOptions(request)
                options.set_do_sample(False)
                options.set_min_generated_tokens(completion.max_tokens)
                options.set_max_generated_tokens(completion.max_tokens)
                request.begin_turn(completion.prompt, options)
                running[request] = completion
            for event in engine.run(events):
                ended = event.finish_reason != og.FinishReason.NONE
                completion = running.pop(event.request) if ended else running[event.request]
                completion.tell(event.token)
                if ended:
                    completion.tell(None)


def app(loop: Loop) -> Starlette:
    async def complete(request: Request) -> Response:
        body = await request.json()
        own = Completion(np.array(loop.tokenizer.encode(body["prompt"]), np.int32),
                         body["max_tokens"], asyncio.get_running_loop())
        loop.completions.put(own)
        return StreamingResponse(_events(own, loop.tokenizer.create_stream()),
                                 media_type="text/event-stream")

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "smollm2", "object": "model"}]})

    return Starlette(routes=[Route("/v1/completions", complete, methods=["POST"]),
                             Route("/v1/models", models)])


async def _events(completion: Completion, text: og.TokenizerStream) -> AsyncIterator[bytes]:
    count = 0
    while (token := await completion.tokens.get()) is not None:
        count += 1
        yield _event({"choices": [{"index": 0, "text": text.decode(token)}]})
    yield _event({"choices": [], "usage": {
        "prompt_tokens": len(completion.prompt), "completion_tokens": count,
        "total_tokens": len(completion.prompt) + count}})
    yield b"data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"object": "text_completion", "model": "smollm2",
                                   **content}).encode() + b"\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max_batch_size", type=int, default=16)
    arguments = parser.parse_args()
    loop = Loop(arguments.model, arguments.max_batch_size)
    loop.start()
    uvicorn.run(app(loop), port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
