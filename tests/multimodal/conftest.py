"""Processors of all families."""

import pytest
from processor_checkpoints import FAMILIES, write_checkpoint

from llmc.runtime.multimodal.description import describe_processor
from llmc.runtime.multimodal.processor import Processor, ProcessorDescription


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Directories and tokenizers by family."""
    written = {}
    for name, family in FAMILIES.items():
        folder = tmp_path_factory.mktemp(name)
        written[name] = folder, write_checkpoint(family, folder)
    return written


@pytest.fixture(scope="session")
def processors(checkpoints):
    """Processors by family, made from the JSON of their descriptions alone."""
    return {name: Processor(ProcessorDescription.model_validate_json(
        describe_processor(*own).model_dump_json())) for name, own in checkpoints.items()}
