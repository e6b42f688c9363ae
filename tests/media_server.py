"""`llmc` whose model reads the tokens of images and not their rows."""

from llmc.cli import main
from llmc.runtime.core.request import InputProcessor
from llmc.runtime.prompts import MediaPrompt

_requests = InputProcessor.requests


def _without_rows(self, prompts, params):
    return _requests(self, [own.token_ids if isinstance(own, MediaPrompt) else own
                            for own in prompts], params)


if __name__ == "__main__":
    InputProcessor.requests = _without_rows
    main()
