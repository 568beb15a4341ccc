"""`3dtrn serve`: a page on this machine that changes a plan and shows its report at once."""
