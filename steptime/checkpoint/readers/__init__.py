"""Single files: one module per format, each reading headers and metadata only."""
