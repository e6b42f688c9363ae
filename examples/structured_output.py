"""Constrain completions: `python examples/structured_output.py CASE_DIR`."""

import json
import sys

import llmc

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "certain": {"type": "boolean"}},
    "required": ["answer", "certain"],
    "additionalProperties": False,
}


def main(case_dir: str) -> None:
    with llmc.LLM(case_dir) as llm:
        params = [llmc.SamplingParams(guided_json=SCHEMA, max_tokens=40),
                  llmc.SamplingParams(guided_choice=["red", "green"], max_tokens=40)]
        prompts = ["Is Paris in France? As JSON: ", "The color of grass is "]
        first, second = llm.generate(prompts, params)
        print(json.loads(first.text))
        print(second.text)


if __name__ == "__main__":
    main(sys.argv[1])
