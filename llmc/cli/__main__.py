"""`python -m llmc.cli`."""

from llmc.cli import main

main()
