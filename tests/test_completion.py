"""`--completion`: what bash, fish and zsh complete, where they are installed, and that all scripts name the same words."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import time

import pytest

from steptime.commands import cli


def script(shell, capsys):
    assert cli.main(["--completion", shell]) == 0
    return capsys.readouterr().out


def bash(text, lines, home):
    """What bash offers for the last word of each line."""
    (home / ".bash").write_text(text, encoding="utf-8")
    program = ["source .bash"]
    for words in lines:
        line = " ".join(f"'{word}'" for word in ("3dtrn", *words))
        program.append(f'COMP_WORDS=({line}); COMP_CWORD={len(words)}; COMPREPLY=(); _3dtrn; echo "${{COMPREPLY[@]}}"')
    command = ["bash", "--norc", "--noprofile", "-c", "\n".join(program)]
    found = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
    assert found.stderr == ""
    return [line.split() for line in found.stdout.splitlines()]


def fish(text, lines, home):
    """What fish offers."""
    (home / ".fish").write_text(text, encoding="utf-8")
    program = ["source .fish", *(f"echo (complete -C '3dtrn {' '.join(words)}')" for words in lines)]
    command = ["fish", "-c", "\n".join(program)]
    found = subprocess.run(command, cwd=home, env=at(home), capture_output=True, text=True, check=True)
    assert found.stderr == ""
    return [line.split() for line in found.stdout.splitlines()]


def zsh(text, lines, home):
    """What zsh puts into the line of a terminal at the Tab key; nothing where it has several.

    Ctrl-T writes the line down and empties it.
    """
    (home / ".zsh").write_text(text, encoding="utf-8")
    told = home / ".told"
    told.write_text("", encoding="utf-8")
    start = "source ./.zsh; tell() { print -r -- $BUFFER >> .told; BUFFER= }; zle -N tell; bindkey '^T' tell; echo >> .told\n"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(home)
        os.execvpe("zsh", ["zsh", "-f", "-i"], at(home) | {"ZDOTDIR": str(home), "TERM": "dumb"})
    for number, typed in enumerate((start, *(f"3dtrn {' '.join(words)}\t\x14" for words in lines)), 1):
        os.write(terminal, typed.encode())
        end = time.monotonic() + 60.0
        while told.read_text(encoding="utf-8").count("\n") < number and time.monotonic() < end:
            time.sleep(0.01)
    made = [line.split() for line in told.read_text(encoding="utf-8").splitlines()[1:]]
    os.close(terminal)
    os.waitpid(pid, 0)
    assert [line[:-1] for line in made] == [["3dtrn", *words[:-1]] for words in lines]
    return [[word for word in line[-1:] if word != words[-1]] for line, words in zip(made, lines, strict=True)]


def at(home):
    return os.environ | {"HOME": str(home)}


WANTED = [
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
]
"""Words of a line, and what is offered for the last one."""


@pytest.mark.parametrize("shell", [shell for shell in (bash, fish, zsh) if shutil.which(shell.__name__)])
def test_the_shell_completes(shell, capsys, tmp_path):
    (tmp_path / "plan.yaml").write_text("", encoding="utf-8")
    lines = [words for words, _ in WANTED]
    offered = dict(zip(map(tuple, lines), shell(script(shell.__name__, capsys), lines, tmp_path), strict=True))
    assert offered == {tuple(words): [] if shell is zsh and len(wanted) > 1 else wanted for words, wanted in WANTED}


def test_every_subcommand_and_option_is_offered(capsys):
    bash, fish, zsh = (script(shell, capsys) for shell in ("bash", "fish", "zsh"))
    assert bash.partition("\n")[2] in zsh
    assert bash.startswith('# eval "$(3dtrn --completion bash)" in ~/.bashrc\n')
    assert zsh.startswith('# eval "$(3dtrn --completion zsh)" in ~/.zshrc\n')
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
