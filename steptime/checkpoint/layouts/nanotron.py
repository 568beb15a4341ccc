from __future__ import annotations


def sections(scan, folder, files):
    return [], set()
