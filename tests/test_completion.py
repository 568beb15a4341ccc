"""`--completion`: what bash itself completes, and that the other scripts name the same words."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from steptime.commands import cli


def script(shell, capsys):
    assert cli.main(["--completion", shell]) == 0
    return capsys.readouterr().out


def completed(text, words, cwd, tmp_path):
    """What bash offers for the last word of a line."""
    path = tmp_path / "completion.bash"
    path.write_text(text, encoding="utf-8")
    line = " ".join(f"'{word}'" for word in ("3dtrn", *words))
    program = (
        f"source {path}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _3dtrn; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    command = ["bash", "--norc", "--noprofile", "-c", program]
    found = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert found.stderr == ""
    return found.stdout.split()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["se"], ["search", "sensitivity", "serve"]),
        (["sea"], ["search"]),
        (["pl"], ["plan.yaml"]),
        (["search", "pl"], ["plan.yaml"]),
        (["search", "--dev"], ["--devices"]),
        (["search", "plan.yaml", "--par"], ["--pareto"]),
        (["plan.yaml", "--min"], ["--min-mfu"]),
        (["--model", "llama3-7"], ["llama3-70b"]),
        (["--model", "llama3-70b", "--machine", "dgx-h1"], ["dgx-h100"]),
        (["plan.yaml", "--color", "al"], ["always"]),
        (["show", "dgx-h1"], ["dgx-h100"]),
        (["--completion", "z"], ["zsh"]),
    ],
)
def test_bash_completes(words, wanted, capsys, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "plan.yaml").write_text("", encoding="utf-8")
    assert completed(script("bash", capsys), words, home, tmp_path) == wanted


def test_every_subcommand_and_option_is_offered(capsys):
    bash, fish = script("bash", capsys), script("fish", capsys)
    assert bash in script("zsh", capsys)
    for name in cli.SUBCOMMANDS:
        assert f"\n    {name}) words=" in bash
        assert f"-a '{name}'" in fish
        for action in cli.parser(name)._actions:
            for option in action.option_strings:
                assert option in bash
                assert f"-n '__fish_seen_subcommand_from {name}' -{'l' if option[:2] == '--' else 's'} " in fish


CHECKS = {"bash": "-n", "zsh": "-n", "fish": "--no-execute"}


@pytest.mark.parametrize(("shell", "check"), [pair for pair in CHECKS.items() if shutil.which(pair[0])])
def test_the_shell_parses_its_script(shell, check, capsys, tmp_path):
    path = tmp_path / "script"
    path.write_text(script(shell, capsys), encoding="utf-8")
    assert subprocess.run([shell, check, str(path)], check=False).returncode == 0
