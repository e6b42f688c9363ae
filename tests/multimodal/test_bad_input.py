"""Images, audio, URLs and messages that clients must not get through, or that are unusual.

Tests that show the same for prompts of the library, for `llmc run` and for the server:

| input | library | `llmc run` | server |
| --- | --- | --- | --- |
| no picture, truncated, 0 or 100,000 pixels a side, bomb | here, 1 | 3 | 5 |
| EXIF turned, alpha, CMYK, 16 bits, animated | here | 3 | 5 |
| more items than the limit | no limit | no limit | 5, 6 |
| placeholders that do not match | here, 1, 2 | 3 | 5, 6 |
| no audio, no samples, three hours | here, 2 | 2 | 6 |
| other rates and channels | here, 2 | | 6 |
| a URL where none is allowed | here, 2, 4 | 2, 3 | 5, 6 |
| others go on | 1, 2 | 3 (prompt files) | 5, 6 |

1 tests/runtime/test_images.py, 2 tests/runtime/test_audio_prompts.py, 3 test_media_cli.py,
4 test_media_prompts.py, 5 tests/server/test_media.py, 6 tests/server/test_audio_parts.py
"""

import base64
import http.server
import ipaddress
import socket
import threading
import time
from contextlib import suppress
from io import BytesIO

import numpy as np
import pytest
import soundfile
from PIL import Image
from processor_checkpoints import FAMILIES, speech_of
from transformers import WhisperFeatureExtractor

from llmc.errors import LlmcError
from llmc.runtime.multimodal.audio import load_audio
from llmc.runtime.multimodal.images import load_image
from llmc.runtime.multimodal.media import MediaAccess, fetch
from llmc.runtime.multimodal.messages import split_media

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))


def png(image, form="PNG", **options):
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def test_unusual_images_become_rgb():
    clear = Image.new("RGBA", (2, 3), (9, 9, 9, 0))
    assert (load_image(png(clear)) == 255).all()
    assert load_image(png(Image.new("CMYK", (2, 3)), "TIFF")).shape == (3, 3, 2)
    deep = Image.fromarray(np.full((3, 2), 0x80FF, np.uint16))
    assert (load_image(png(deep)) == 0x80).all()
    exif = Image.Exif()
    exif[0x0112] = 6
    assert load_image(png(Image.new("RGB", (4, 3)), "JPEG", exif=exif)).shape == (3, 4, 3)
    red, blue = Image.new("RGB", (2, 2), "red"), Image.new("RGB", (2, 2), "blue")
    first = load_image(png(red, "GIF", save_all=True, append_images=[blue]))
    assert first[0].min() > 200 and first[2].max() < 50


@pytest.mark.parametrize(("data", "message"), [
    (b"", "are no image"), (b"no image at all", "are no image"),
    (png(Image.effect_noise((90, 90), 50))[:500], "cannot be decoded"),
    (png(Image.new("1", (100_000, 1))), "limit"), (png(Image.new("1", (9000, 9000))), "limit"),
    (Image.new("RGB", (0, 5)), "0 x 5 pixels")])
def test_bad_images_are_refused(data, message):
    with pytest.raises(LlmcError, match=message):
        load_image(data)


@pytest.fixture(scope="module")
def site():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(302 if self.path == "/away" else 200)
            if self.path == "/away":
                self.send_header("Location", "http://169.254.169.254/secret")
            self.end_headers()
            self.wfile.write(b"x" * 5000)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_urls_reach_only_what_is_allowed(site, tmp_path):
    everything = MediaAccess(("*",), LOOPBACK, tmp_path, max_bytes=6000)
    assert fetch(f"{site}/a", everything) == b"x" * 5000
    (tmp_path / "in").write_bytes(b"inside")
    (tmp_path / "out").symlink_to("/etc/passwd")
    assert fetch(f"file://{tmp_path}/in", everything) == b"inside"
    assert fetch("data:image/png;base64,QUJD", MediaAccess()) == b"ABC"
    for url, access, message in (
            (f"{site}/a", MediaAccess(), "allows no http"),
            (f"{site}/a", MediaAccess(("example.com",)), "does not allow"),
            (f"{site}/a", MediaAccess(("*",)), "not public"),
            (f"{site}/away", everything, "not public"),
            (f"{site}/a", MediaAccess(("*",), LOOPBACK, max_bytes=10), "more than 10 bytes"),
            (f"file://{tmp_path}/in", MediaAccess(), "allows no file"),
            (f"file://{tmp_path}/out", everything, "no file below"),
            (f"file://{tmp_path}/../x", everything, "no file below"),
            ("ftp://host/a", everything, "scheme"), ("data:,abc", everything, "begins with"),
            ("data:image/png;base64,*", everything, "invalid base64")):
        with pytest.raises(LlmcError, match=message):
            fetch(url, access)


@pytest.fixture
def trickle():
    """The address of a server that sends the start of a TLS record, then a byte now and then."""
    def serve(listener):
        with suppress(OSError):
            peer, _ = listener.accept()
            peer.sendall(b"\x16\x03\x03\x40\x00")
            while True:
                peer.sendall(b"\0")
                time.sleep(0.05)

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, args=(listener,))
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    thread.join()


def test_a_handshake_ends_at_the_time_limit(trickle):
    with pytest.raises(LlmcError, match=r"was not read within 0\.4 s"):
        fetch(f"https://{trickle}/a", MediaAccess(("*",), LOOPBACK, timeout_s=0.4))


def wav(samples, rate=16_000):
    file = BytesIO()
    soundfile.write(file, samples, rate, format="WAV")
    return file.getvalue()


def test_bad_audio_is_refused(processors):
    for data, seconds, message in (
            (b"no audio", 9, "are no audio"), (wav(np.zeros(0)), 9, "no samples"),
            (wav(np.zeros(40_000)), 1, "longer than 1 s")):
        with pytest.raises(LlmcError, match=message):
            load_audio(data, 16_000, seconds)
    with pytest.raises(LlmcError, match="at most 30 s"):
        processors["qwen2_audio"].process_audio([np.zeros(500_000, np.float32)])
    assert len(load_audio(wav(np.zeros((4800, 2)), 48_000), 16_000)) == 1600


def test_whispers_features_are_those_of_transformers(processors):
    speech = speech_of(3.21)
    item, = processors["whisper"].process_audio([speech])
    extractor = WhisperFeatureExtractor(**{
        key: own for key, own in FAMILIES["whisper"].audio.items() if key == "feature_size"})
    padded = np.pad(speech, (0, 480_000 - len(speech)))
    expected = extractor._np_extract_fbank_features([padded], "cpu")
    np.testing.assert_allclose(item.arrays["input_features"], expected, atol=1e-6)


def test_media_are_taken_out_of_messages():
    data = base64.b64encode(b"sound").decode()
    messages, sources = split_media([{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:x"}}, {"type": "text", "text": "a"},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]}])
    assert [own["type"] for own in messages[0]["content"]] == ["image", "text", "audio"]
    assert [own.value for own in sources] == ["data:x", b"sound"]
    with pytest.raises(LlmcError, match="is a video, which llmc does not support"):
        split_media([{"role": "user", "content": [{"type": "video"}]}])


def test_placeholders_must_match_the_items(processors):
    processor = processors["qwen3_vl"]
    items = processor.process_images([Image.new("RGB", (64, 64))])
    for text in ("none", "<|image_pad|><|image_pad|>"):
        with pytest.raises(LlmcError, match="one placeholder per item"):
            processor.expand_text(text, items)
    with pytest.raises(LlmcError, match="takes no audio"):
        processor.process_audio([b""])
