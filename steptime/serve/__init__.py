"""`3dtrn serve`: interactive page to change a plan and see its report at once."""
