"""Runs the tests of models, and writes docs/models.md from their results:

    python server/text_generation_server/tests/make_models_page.py [--missing] [options of pytest]

Results of tests that are not chosen (`-k bloom`) stay as the last run has left them, in `model_results.json` beside
this file. `--missing` leaves out the tests that have passed, as after a run that was interrupted. `--collect-only` runs
no test, and writes the page anew."""

import subprocess
import sys
from pathlib import Path

import pytest
from model_results import FILES, PAGE, Recorder, read_results, this_run, write_results


def main() -> int:
    options, run = sys.argv[1:], this_run()
    recorder = Recorder(read_results().passed() if "--missing" in options else frozenset())
    options = [option for option in options if option != "--missing"]
    code = pytest.main(["-m", "", "-p", "no:cacheprovider", *map(str, FILES), *options], plugins=[recorder])
    if not recorder.is_complete:
        print(f"{PAGE.name} is left as it is: not all tests could be collected", file=sys.stderr)
        return int(code)
    results = read_results()
    results.merge(run, recorder.ended, recorder.known)
    write_results(results)
    # Another process: what tests have set up, transformers' log above all, is of no use to the page.
    subprocess.run([sys.executable, Path(__file__).with_name("models_page.py")], check=True)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
