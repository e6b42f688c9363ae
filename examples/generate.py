"""Complete prompts: `python examples/generate.py CASE_DIR`."""

import sys

import llmc


def main(case_dir: str) -> None:
    with llmc.LLM(case_dir) as llm:
        params = llmc.SamplingParams(max_tokens=32)
        for completion in llm.generate(["The sea is", "The capital of France is"], params):
            print(completion.text, completion.finish_reason)
        for piece in llm.stream("The sea is", llmc.SamplingParams(temperature=0.8, seed=1)):
            print(piece.text, end="", flush=True)  # closing the iterator cancels the request
        print()
        logits = llm.logits([1, 2, 3])  # float32 [num_tokens, vocab_size]
        print(logits.shape)


if __name__ == "__main__":
    main(sys.argv[1])
