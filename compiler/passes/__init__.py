"""The compiler's rewrites, one per file; `llmc.compiler.pipeline` defines their order."""
