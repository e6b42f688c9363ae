"""Compiled programs, declared to the CUDA engine without a GPU."""

from llmc.artifacts.manifest import read_manifest
from llmc.artifacts.program import draft_part, read_program
from llmc.runtime.engines.cuda import build_program, declare_arenas


def limits_of(manifest):
    return dict(dtype=manifest.dtype, max_batch=3, max_tokens=128, max_logits=8,
                max_seq_len=manifest.dims.max_seq_len, block_size=4,
                mem_max_seq_len=manifest.mem_max_seq_len,
                max_loras=2, max_lora_rank=8)


def schedules_of(case, rank=0):
    chip = read_manifest(case).chips[rank]
    owners = [chip, *(own for own in (chip.encoder, *chip.drafts) if own)]
    return [read_program(case / step.path) for own in owners for step in own.steps]


def build(extension, manifest, schedules):
    """Declare the programs of the model and of its encoder or draft model, if any."""
    others = map(draft_part, range(len(schedules))) if manifest.draft else ["encoder"]
    parts = dict(zip(("model", *others), schedules, strict=False))
    program = declare_arenas(extension, parts, limits_of(manifest))
    build_program(program, parts, manifest)
    return program
