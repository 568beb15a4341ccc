"""Published measured training runs, and how far the estimates are from them: what `3dtrn validate` prints."""
