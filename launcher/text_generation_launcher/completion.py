"""Completes command lines in a shell: commands, flags, their values, and the models of this machine.

A shell's script starts this program with VARIABLE, the name of the shell, and with the words up to the cursor as
arguments. Each line of the answer is one way to complete the last word. Without an answer, shells offer files.
"""

# ruff: noqa: RUF009  (`flag` returns `dataclasses.field`, which ruff cannot see)

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import get_origin

from text_generation_common.flags.declaration import REQUIRED, Flag, flag, single_type
from text_generation_common.flags.programs import ProgramFlags
from text_generation_launcher.local_models import hub_cache, local_models

PROGRAM, VARIABLE = "text-generation-launcher", "_TEXT_GENERATION_LAUNCHER_COMPLETE"
COMPLETION = ProgramFlags(changes={}, has_variables=False)
_CACHE = "--huggingface-hub-cache"


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFlags:
    shell: Shell = flag(REQUIRED, "bash, zsh or fish.", positional=True)


SCRIPTS: Mapping[Shell, str] = {
    Shell.bash: f"""_text_generation_launcher() {{
    mapfile -t COMPREPLY < <({VARIABLE}=bash "$1" "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2> /dev/null)
    if [[ ${{COMPREPLY[0]-}} == */ ]]; then compopt -o nospace 2> /dev/null; fi
}}
complete -o bashdefault -o default -F _text_generation_launcher {PROGRAM}""",
    Shell.zsh: f"""#compdef {PROGRAM}
_{PROGRAM}() {{
    local -a found folders
    found=(${{(f)"$({VARIABLE}=zsh ${{(Q)words[1]}} "${{(@Q)words[2,CURRENT]}}" 2> /dev/null)"}})
    folders=(${{(M)found:#*/}})
    found=(${{found:#*/}})
    if (( $#found + $#folders == 0 )); then _files; return; fi
    _describe 'value' found
    _describe 'folder' folders -S ''
}}
if [[ $funcstack[1] == _{PROGRAM} ]]; then _{PROGRAM} "$@"; else compdef _{PROGRAM} {PROGRAM}; fi""",
    Shell.fish: f"""function __text_generation_launcher_complete
    set -l words (commandline -opc)
    set -l found ({VARIABLE}=fish $words[1] $words[2..] (commandline -ct) 2> /dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command {PROGRAM} --no-files --arguments '(__text_generation_launcher_complete)'""",
}


def completed(
    shell: str,
    words: Sequence[str],
    environ: Mapping[str, str],
    commands: Mapping[str, str],
    flags_of_command: Callable[[str], Iterable[Flag]],
) -> Iterator[str]:
    """Lines for the shell. `commands` has the help of each command by its name, `flags_of_command` the flags of each,
    and of "", which serves."""
    *before, word = words or [""]
    command = before[0] if before and before[0] in commands else ""
    before, word, kept = _parted(before[1:] if command else before, word)
    quote = word[:1] if shell == Shell.bash and word[:1] in ("'", '"') else ""
    word = re.sub(r"\\(.)", r"\1", word.removeprefix(quote)) if shell == Shell.bash else word
    found = dict(_found(list(flags_of_command(command)), before, word, environ))
    if not words[1:]:
        found |= {name: text.partition(".")[0] for name, text in commands.items() if name.startswith(word)}
    for value, help in found.items():
        yield _line(shell, kept + value, " ".join(help.split()), bool(quote))


def _parted(before: list[str], word: str) -> tuple[list[str], str, str]:
    """The words before the one to complete, that word, and the flag with `=` that stays in front of it. bash makes `=`
    a word of its own."""
    if word == "=":
        return before, "", ""
    if before[-1:] == ["="]:
        return before[:-1], word, ""
    name, equals, value = word.partition("=")
    return ([*before, name], value, name + equals) if equals and name.startswith("--") else (before, word, "")


def _found(
    flags: Sequence[Flag], before: Sequence[str], word: str, environ: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Ways to complete `word`, each with its help."""
    named = {name: each for each in flags if not each.positional for name in (each.flag_name, each.short) if name}
    wanted = named.get(before[-1]) if before else None
    if wanted is not None and single_type(wanted.type) is not bool:
        yield from ((value, "") for value in _values(wanted, before, word, environ) if value.startswith(word))
        return
    positional = [each for each in flags if each.positional]
    for each in positional:
        yield from ((value, "") for value in each.choices or () if value.startswith(word))
    if word.startswith("-") or not (word or positional):
        given = {named[name].name for name in before if name in named and get_origin(named[name].type) is not tuple}
        offered = [each for each in flags if not (each.hidden or each.positional or each.name in given)]
        names = [(name, each.help) for each in offered for name in (each.flag_name, each.off_name) if name]
        yield from ((name, help) for name, help in (*names, ("--help", "")) if name.startswith(word))


def _values(flag: Flag, before: Sequence[str], word: str, environ: Mapping[str, str]) -> Iterable[str]:
    if flag.name != "model_id":
        return flag.choices or ()
    cache = before[before.index(_CACHE) + 1] if _CACHE in before[:-1] else None
    return local_models(word, hub_cache(environ, cache))


def _line(shell: str, value: str, help: str, is_quoted: bool) -> str:
    if shell == Shell.bash:
        return value if is_quoted else re.sub(r"([^\w@%+=:,./~-])", r"\\\1", value)
    if shell == Shell.zsh:
        return value.replace(":", "\\:") + (f":{help}" if help else "")
    return f"{value}\t{help}" if help else value
