"""The sections of docs/reproduction.md: one module each, Markdown blocks out."""
