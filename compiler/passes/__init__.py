"""The compiler's rewrites, one file each; `llmc.compiler.pipeline` holds their order."""
