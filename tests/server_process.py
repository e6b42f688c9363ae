"""A process of `llmc serve` on a free port, the `openai` package's client of it, and a request to
the application itself.
"""

import asyncio
import json
import re
import resource
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager

import openai


class Server:
    """A process of `llmc serve`; `descriptors` are the most files that it may have open."""

    def __init__(self, case, *options, cwd=None, descriptors=None):
        limit = (descriptors, descriptors)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmc.cli", "serve", str(case), "--port", "0",
             "--served_model_name", "tiny", *map(str, options)],
            stderr=subprocess.PIPE, text=True, cwd=cwd, preexec_fn=None if descriptors is None
            else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit))
        first = []
        for line in self.process.stderr:
            first.append(line)
            if found := re.search(r'https?://[^"]+', line):
                self.url = found[0]
                break
        else:
            raise AssertionError("".join(first))
        self.startup = first[-1]  # the line that says that it serves
        self.log = []  # what comes then; a process whose log nobody reads waits
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr))
        self._reader.start()
        self.port = int(self.url.rsplit(":", 1)[1])
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return response.read().decode()

    def post(self, path, body, **headers):
        """A status, its headers and its JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {
            "content-type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.headers, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, error.headers, json.loads(error.read())

    def end(self):
        """Ask it to end; its exit code, and its log from the time on when it was ready."""
        self.process.terminate()
        code = self.process.wait(20)
        self._reader.join()
        return code, "".join(self.log)


@contextmanager
def serving(case, *options, **process):
    server = Server(case, *options, **process)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


def until(condition, seconds=10):
    """Wait for what must become true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


async def ask(app, path, body=None, answered=None):
    """A status and a body, by the application itself; the event is set as the body begins."""
    sent, asked = [], asyncio.Event()

    async def receive():
        if asked.is_set():
            await asyncio.Event().wait()  # the client stays
        asked.set()
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message):
        sent.append(message)
        if answered is not None and message.get("body"):
            answered.set()

    await app({"type": "http", "asgi": {"spec_version": "2.3"}, "http_version": "1.1",
               "method": "GET" if body is None else "POST", "path": path, "raw_path": path.encode(),
               "query_string": b"", "headers": [(b"content-type", b"application/json")],
               "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 1), "scheme": "http"},
              receive, send)
    return sent[0]["status"], b"".join(own.get("body", b"") for own in sent[1:]).decode()
