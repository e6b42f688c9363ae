"""A process of `llmc serve` on a free port, its `openai` client, and direct ASGI requests."""

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
    """A process of `llmc serve`; `descriptors` limits its open files."""

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
        self.startup = first[-1]  # the line that reports readiness
        self.log = []  # later lines; a process with a full log pipe would block
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr))
        self._reader.start()
        self.port = int(self.url.rsplit(":", 1)[1])
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return response.read().decode()

    def post(self, path, body, **headers):
        """Return the status, the headers and the JSON of a response."""
        status, answer_headers, text = self._post(path, body, **headers)
        return status, answer_headers, json.loads(text)

    def post_text(self, path, body):
        """Return the status and the text of a response."""
        status, _, text = self._post(path, body)
        return status, text.decode()

    def _post(self, path, body, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {
            "content-type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.headers, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()

    def end(self):
        """Send SIGTERM; return the exit code and the log since readiness."""
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
    """Wait until the condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


async def ask(app, path, body=None, answered=None):
    """Request the ASGI application; return status and body. The event is set at the first chunk."""
    sent, asked = [], asyncio.Event()

    async def receive():
        if asked.is_set():
            await asyncio.Event().wait()  # the client stays connected
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
