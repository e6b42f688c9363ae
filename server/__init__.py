"""`llmc serve`: the OpenAI HTTP API over `AsyncLLM`."""
