"""The best layouts of a job: every layout that can run, screened in numpy columns, the finalists walked by `estimate`."""
