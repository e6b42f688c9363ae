"""Ask `llmc serve` about a picture: `python examples/openai_image.py PICTURE BASE_URL`."""

import base64
import mimetypes
import sys
from pathlib import Path

from openai import OpenAI


def main(picture: str, base_url: str = "http://127.0.0.1:8000/v1") -> None:
    data = base64.b64encode(Path(picture).read_bytes()).decode()
    url = f"data:{mimetypes.guess_type(picture)[0]};base64,{data}"
    with OpenAI(base_url=base_url, api_key="unused") as client:
        answer = client.chat.completions.create(
            model=client.models.list().data[0].id, messages=[{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": url}},
                {"type": "text", "text": "What is in this picture?"}]}])
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
