"""The program `text-generation-launcher`. Ctrl-C ends it without a traceback even while its modules are loaded."""

import signal


def main() -> None:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from text_generation_launcher import cli

    signal.signal(signal.SIGINT, before)
    cli.main()
