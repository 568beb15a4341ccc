"""Completion scripts for shells, made from the parsers: `3dtrn --completion bash|zsh|fish`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from steptime.hardware.machine import machine_names
from steptime.model.presets import model_names

_BASH = """\
# eval "$(3dtrn --completion {shell})" in ~/.{shell}rc
_3dtrn() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} words values
    COMPREPLY=()
    case "${{COMP_WORDS[1]}} $prev" in
{values}
    *) values= ;;
    esac
    case "${{COMP_WORDS[1]}}" in
{options}
    esac
    if [[ -n $values ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$cur"))
    elif [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$words" -- "$cur"))
    else
        ((COMP_CWORD > 1)) || COMPREPLY=($(compgen -W "{names}" -- "$cur"))
        COMPREPLY+=($(compgen -f -- "$cur"))
    fi
}}
complete -o filenames -F _3dtrn 3dtrn
"""


def script(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """The script for a shell. `parsers`: by subcommand, the bare command under ""."""
    if shell == "fish":
        return _fish(parsers)
    text = _bash(parsers, shell)
    head, _, rest = text.partition("\n")
    return (
        text if shell == "bash" else f"{head}\nautoload -Uz compinit bashcompinit && compinit && bashcompinit\n{rest}"
    )


def _bash(parsers: Mapping[str, argparse.ArgumentParser], shell: str) -> str:
    values, options = [], []
    for name in [*filter(None, parsers), ""]:  # otherwise it is the bare command
        for option, words in _values(name, parsers[name]).items():
            first = f'"{name} {option}"' if name else f'*" {option}"'
            values.append(f'    {first}) values="{" ".join(words)}" ;;')
        options.append(f'    {name or "*"}) words="{" ".join(_options(parsers[name]))}" ;;')
    return _BASH.format(
        shell=shell, values="\n".join(values), options="\n".join(options), names=" ".join(filter(None, parsers))
    )


def _fish(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    lines = ["# 3dtrn --completion fish > ~/.config/fish/completions/3dtrn.fish"]
    names = " ".join(name for name in parsers if name)
    bare = f"not __fish_seen_subcommand_from {names}"
    lines += [f"complete -c 3dtrn -n '__fish_is_first_arg' -a '{name}'" for name in parsers if name]
    for name, parser in parsers.items():
        where = f"__fish_seen_subcommand_from {name}" if name else bare
        values = _values(name, parser)
        for option in _options(parser):
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            words = f" -x -a '{' '.join(values[option])}'" if option in values else ""
            lines.append(f"complete -c 3dtrn -n '{where}' {flag}{words}")
        if name in values:
            lines.append(f"complete -c 3dtrn -n '{where}' -a '{' '.join(values[name])}'")
    return "\n".join(lines) + "\n"


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]  # noqa: SLF001  argparse has no other way


def _values(name: str, parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Words that may follow each option, or each subcommand as its argument."""
    found = {
        option: [str(choice) for choice in action.choices]
        for action in parser._actions  # noqa: SLF001  argparse has no other way
        for option in action.option_strings
        if action.choices
    }
    known = {"--model": model_names(), "--machine": machine_names()}
    found |= {option: words for option, words in known.items() if option in _options(parser)}
    return found | ({name: [*machine_names(), *model_names()]} if name == "show" else {})
