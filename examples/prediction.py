"""Generate a text whose content is expected: `python examples/prediction.py CASE_DIR`."""

import sys

import llmc


def main(case_dir: str) -> None:
    text = "the quick brown fox jumps over the lazy dog;"
    with llmc.LLM(case_dir) as llm:
        params = llmc.SamplingParams(max_tokens=16, prediction=f" {text}")
        completion, = llm.generate([f"{text} {text}"], params)
        print(f"{completion.text!r}: {completion.accepted_prediction_tokens} drafts accepted, "
              f"{completion.rejected_prediction_tokens} rejected")


if __name__ == "__main__":
    main(sys.argv[1])
