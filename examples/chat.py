"""Ask a question through the model's chat template: `python examples/chat.py CASE_DIR QUESTION`."""

import sys

import llmc


def main(case_dir: str, question: str) -> None:
    with llmc.LLM(case_dir) as llm:
        messages = [{"role": "user", "content": question}]
        prompt = llm.chat_prompt(messages)
        for piece in llm.stream(prompt, llmc.SamplingParams(max_tokens=64)):
            print(piece.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
