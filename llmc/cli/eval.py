"""`llmc eval`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from llmc.cli.compiler_import import import_compiler
from llmc.cli.options import case_options, device_option, json_option, require_case_dir
from llmc.cli.output import finish_check
from llmc.cli.progress import Phases
from llmc.errors import LlmcError


@click.command("eval")
@case_options
@click.option("--task", required=True,
              type=click.Choice(["perplexity", "answers", "summarize", "similarity",
                                 "retrieval"]),
              help="Metric to measure; answers: exact match and perplexity of answers, also to "
                   "prompts with images or audio; summarize needs the eval extra, and similarity "
                   "and retrieval a model for task embed.")
@click.option("--data", type=click.Path(path_type=Path), default=None,
              help="Text file; for answers JSON lines of a prompt file with answer, for summarize "
                   "with article and summary, for similarity with text_1, text_2 and score, for "
                   "retrieval with id and text, and with query and relevant (ids).  [default: data "
                   "that are part of llmc; none for answers]")
@click.option("--hf_dir", default=None, help="Original model, to measure transformers as well.")
@click.option("--tolerance", type=float, default=None,
              help="Maximum difference between the two: relative for perplexity, points for "
                   "ROUGE, absolute for similarity and retrieval.  [default for perplexity: "
                   "0.0001 in float32, 0.002 in float16, 0.02 in bfloat16, 0.05 with 8-bit and "
                   "0.5 with 4-bit weights; for ROUGE: 1 in float32, else 5; for similarity and "
                   "retrieval: 0.001, 0.01, 0.02, 0.02 and 0.1]")
@click.option("--max_length", type=int, default=None,
              help="Length of a window of perplexity, in tokens.  [default: the KV cache's, at "
                   "most 1024]")
@click.option("--stride", type=int, default=None,
              help="Distance between windows of perplexity, in tokens.  [default: half of "
                   "max_length]")
@click.option("--max_tokens", type=int, default=None,
              help="Maximum length of a summary or an answer, in tokens.  [default: 64]")
@click.option("--chat", is_flag=True, default=None,
              help="For answers: put each prompt into the model's chat template.")
@device_option
@json_option
def eval_command(directory: Path | None, case_dir: Path | None, task: str, as_json: bool,
                 **options: Any) -> None:
    """Measure a compiled model's quality: perplexity, answers, ROUGE, similarity or retrieval."""
    found = require_case_dir(directory, case_dir)
    with Phases() as phases:
        if options["hf_dir"] is not None:
            phases.begin("import")
            import_compiler()
        from llmc.compiler.check.answers import answers
        from llmc.compiler.check.evaluate import EvalReport, perplexity, print_report, summarize
        from llmc.compiler.check.retrieval import retrieval
        from llmc.compiler.check.similarity import similarity

        tasks: dict[str, Callable[..., EvalReport]] = {
            "perplexity": perplexity, "answers": answers, "summarize": summarize,
            "similarity": similarity, "retrieval": retrieval}
        measure = tasks[task]
        given = {name: value for name, value in options.items() if value is not None}
        for name in given.keys() - inspect.signature(measure).parameters.keys():
            raise LlmcError(f"--{name} does not apply to --task {task}; leave it out")
        report = measure(found, progress=phases.show, **given)
    finish_check(report, print_report, as_json)
