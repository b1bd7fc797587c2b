"""One stage, in a process of its own: runs its cases one after the other, and ends where the GPU's context is broken.

python -m gpu_check.stages REQUEST_FILE
"""

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import torch

from gpu_check.findings import Case, Context, Journal, Measured, Request
from text_generation_benchmark.process import exit_on_sigterm

BROKEN = 70  # exit status after a case that broke the GPU's context: the cases behind it need a new process


def function_of(name: str) -> Callable[[Context], Iterator[Case]]:
    module, function, *arguments = name.split(":")
    found: Callable[..., Iterator[Case]] = getattr(import_module(f"gpu_check.{module}"), function)
    return lambda context: found(context, *arguments)


def run_cases(cases: Iterable[Case], context: Context) -> bool:
    """Runs the cases that have not begun yet. False if a case broke the GPU's context. An error in a case is a finding,
    and the next case runs."""
    journal = Journal(Path(context.request.journal))
    begun = journal.read().begun
    for case in cases:
        if case.name in begun or context.request.only not in ("", case.name):
            continue
        journal.begin(case.name, case.table, case.cells)
        try:
            for measured in case.run():
                journal.add(case.name, case.finding(measured))
            wait_for(context.device)  # an error of a kernel belongs to the case that launched the kernel
        except Exception as error:  # any error of a case is reported as a result of the check
            report_failure(journal, case, error)
            if is_broken(context.device):
                journal.end(case.name, broken=True)
                return False
        journal.end(case.name)
    return True


def report_failure(journal: Journal, case: Case, error: Exception) -> None:
    journal.add(case.name, case.finding(Measured(failure=reason(error))))


def reason(error: Exception) -> str:
    """The error in one line; its traceback goes into the stage's log."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_broken(device: torch.device) -> bool:
    """Whether the device's context refuses all further work, as it does after a kernel's illegal memory access. A lack
    of memory, or a kernel that cannot be launched, does not break it."""
    try:
        wait_for(device)
        torch.ones(1, device=device).add_(1)
        wait_for(device)
    except RuntimeError:
        return True
    return False


def end_broken() -> NoReturn:
    """Ends the process at once: with a broken context, torch's own end may hang."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(BROKEN)


def main() -> None:
    request = Request.read(Path(sys.argv[1]))
    exit_on_sigterm()
    context = Context(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"), request)
    torch.manual_seed(0)
    with torch.inference_mode():
        going_on = run_cases(function_of(request.function)(context), context)
    if not going_on:
        end_broken()


if __name__ == "__main__":
    main()
