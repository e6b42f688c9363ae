"""A process of `vllm serve` and its `openai` client."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Server:
    """A ready process of `vllm serve`; `process` are arguments of `Popen`."""

    def __init__(self, case_dir, log, *options, **process):
        self.port = free_port()
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [Path(sys.executable).with_name("vllm"), "serve", str(case_dir), "--port",
                 str(self.port), "--host", "127.0.0.1", "--served-model-name", "smollm2",
                 "--shutdown-timeout", "10", *options],
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True, **process)
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise

    def _wait(self):
        end = time.monotonic() + 600
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                self.get("/health")
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise AssertionError(self.log.read_text()[-3000:])

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return response.read().decode()

    def metric(self, name):
        return self.metrics(name)[0]

    def metrics(self, name):
        """Return the metric of each replica."""
        return [float(value) for value in re.findall(rf"^{name}{{.*}} (.*)$", self.get("/metrics"),
                                                     re.MULTILINE)]

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def generated_tokens(self):
        """Return the number of generated tokens of each replica."""
        return self.metrics("vllm:generation_tokens_total")
