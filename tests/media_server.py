"""`llmc` whose model reads the tokens of images and not their rows."""

from llmc.cli import main
from llmc.runtime.core.request import InputProcessor
from llmc.runtime.prompts import MediaPrompt

_requests = InputProcessor.requests


def without_rows(self, prompts, params):
    """`InputProcessor.requests` for a model without an encoder."""
    if isinstance(prompts, MediaPrompt):
        prompts = [prompts]
    return _requests(self, [own.token_ids if isinstance(own, MediaPrompt) else own
                            for own in prompts], params)


if __name__ == "__main__":
    InputProcessor.requests = without_rows
    main()
