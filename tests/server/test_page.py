"""The chat page: one file without external resources."""

import base64
import hashlib
import json
import re
import urllib.request
from html.parser import HTMLParser


class Read(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.fields = []  # attributes of each field, and its open elements
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("input", "textarea"):
            self.fields.append((dict(attrs), [*self._open]))
        if tag not in ("input", "link", "meta"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag


def test_the_page_is_self_contained(server):
    with urllib.request.urlopen(server.url) as response:
        policy, text = response.headers["content-security-policy"], response.read().decode()
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert not re.search(r"https?://|innerHTML|@import|url\(", text)
    tags = Read(text).tags
    for _, attrs in tags:
        assert attrs.get("src") is None and attrs.get("href") in (None, "data:,")
    ids = {attrs["id"] for _, attrs in tags if "id" in attrs}
    assert {*re.findall(r'\$\("(\w+)"\)', text)} <= ids
    knobs = re.search(r"KNOBS = \[(.*?)\]", text)[1]
    assert {*re.findall(r'"(\w+)"', knobs)} <= ids


def test_the_policy_allows_only_the_script_and_style_of_the_page(server):
    with urllib.request.urlopen(server.url) as response:
        policy, text = response.headers["content-security-policy"], response.read().decode()
    sources = dict(directive.split(" ", 1) for directive in policy.split("; "))
    for tag in ("script", "style"):
        content = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert sources[f"{tag}-src"] == f"'sha256-{digest}'"
    assert sources["default-src"] == "'none'" and sources["connect-src"] == "'self'"
    assert sources["img-src"] == "data:" and "unsafe" not in policy
    for name in ("base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert sources[name] == "'none'"
    assert sources["require-trusted-types-for"] == "'script'"


def test_each_field_of_the_page_is_labeled_and_in_a_form(server):
    fields = Read(server.get("/")).fields
    assert [attrs["id"] for attrs, _ in fields if attrs.get("type") == "password"] == ["key"]
    for attrs, ancestors in fields:
        assert "form" in ancestors, attrs
        assert "label" in ancestors or attrs.get("aria-label"), attrs


def test_the_requests_of_the_page_are_served(server):
    text = server.get("/")
    names = set(re.findall(r'values\["([\w:]+)"\]', text))
    told = server.get("/metrics")
    assert len(names) == 6 and all(f"\n{name}{{" in told for name in names)
    body = {"stream": True, "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": "a"}], "temperature": 0.7, "top_p": 0.9,
            "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 4, "seed": 3}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        lines = [line for line in response.read().decode().split("\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: {") for line in lines[:-1])
