"""Ask `llmc serve` with OpenAI's client: `python examples/openai_client.py BASE_URL`."""

import sys

from openai import OpenAI


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    with OpenAI(base_url=base_url, api_key="unused") as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model, stream=True, max_tokens=16,
            messages=[{"role": "user", "content": "Name the capital of France."}])
        for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
