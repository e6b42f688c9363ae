"""Serve concurrent requests in asyncio: `python examples/stream_async.py CASE_DIR`."""

import asyncio
import sys

import llmc


async def answer(llm: llmc.AsyncLLM, prompt: str) -> str:
    params = llmc.SamplingParams(max_tokens=16)
    pieces = [piece.text async for piece in llm.generate(prompt, params)]
    return prompt + "".join(pieces)


async def main(case_dir: str) -> None:
    async with llmc.AsyncLLM(case_dir, max_batch_size=8) as llm:
        prompts = ["The sea is", "The sky is", "Once upon a time"]
        for text in await asyncio.gather(*(answer(llm, prompt) for prompt in prompts)):
            print(text)
        print(llm.metrics())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
