"""`llmc serve`: OpenAI's HTTP interface over `AsyncLLM`."""
