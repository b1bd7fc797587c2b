"""Runs OpenAI's and Anthropic's client libraries for browsers in Chromium, on a page of another origin than the server
at argv[1]. argv[3] is the folder in which their packages are installed."""

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from checks import Checks

from text_generation_router.openapi.tests.chromium import PROGRAM, tab_of

PAGE = "<!doctype html><title>Checks</title><script src=page.js></script>"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of the folder's page: its port makes it another origin."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


def bundle(packages: Path, to: Path) -> None:
    command = [packages / "node_modules" / ".bin" / "esbuild", packages / "page.js", "--bundle", "--log-level=warning"]
    subprocess.run([*command, "--format=iife", f"--outfile={to / 'page.js'}"], check=True)
    (to / "index.html").write_text(PAGE)


def main(url: str, packages: Path) -> None:
    checks = Checks("browser")
    if PROGRAM is None:
        print("FAIL browser: no Chromium; `apt-get install chromium` installs it")
        sys.exit(1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as site, tempfile.TemporaryDirectory() as profile:
        bundle(packages, Path(site))
        with served(Path(site)) as page, tab_of(PROGRAM, Path(profile)) as tab:
            tab.call("Page.navigate", url=page)
            tab.until("typeof outcomesOf === 'function'")
            outcomes = tab.value(f"outcomesOf({url!r})")

    def expect(failure: str) -> None:
        assert not failure, failure

    for name, failure in outcomes.items():
        checks.run(name, partial(expect, failure))
    if not outcomes:
        checks.run("the page has checks", partial(expect, "it has none"))
    checks.exit()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[3]))
