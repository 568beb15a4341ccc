"""What a script passes to the program that it launches: as it is read, and as bash passes it."""

from __future__ import annotations

import subprocess

from steptime.launch.shell.script import read_script


def words(text: str, **env: str) -> list[str]:
    """The words after the program of the one launch command."""
    return [word.text for word in read_script(text, "run.sh", env).arguments]


def bash(text: str, **env: str) -> list[str]:
    """What bash passes: torchrun is a function that prints its words."""
    shown = 'torchrun() { shift; for w in "$@"; do printf "%s\\0" "$w"; done; }\n' + text
    done = subprocess.run(
        ["bash", "--norc", "-c", shown],
        capture_output=True,
        env={"PATH": "/usr/bin:/bin", **env},
        check=True,
        timeout=20,
    )
    return [word.decode() for word in done.stdout.split(b"\0")[:-1]]
