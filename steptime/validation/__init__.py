"""Published measured training runs, and the errors of the estimates on them: what `3dtrn validate` prints."""
