"""A process of `llmc serve` on a free port, and the `openai` package's client of it."""

import json
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager

import openai


class Server:
    """A process of `llmc serve`."""

    def __init__(self, case, *options, cwd=None):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llmc.cli", "serve", str(case), "--port", "0",
             "--served_model_name", "tiny", *map(str, options)],
            stderr=subprocess.PIPE, text=True, cwd=cwd)
        first = []
        for line in self.process.stderr:
            first.append(line)
            if "http://" in line:
                self.url = "http://" + line.split("http://")[1].split('"')[0]
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
def serving(case, *options, cwd=None):
    server = Server(case, *options, cwd=cwd)
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
