"""Build the documentation and look at it: `uv run python tools/docs.py [--open] [--serve PORT] [--fresh]`."""

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from checks.site import build

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "docs" / "_build" / "html"


def main(arguments: Sequence[str]) -> int:
    """Build the site; with an option, show it."""
    parser = argparse.ArgumentParser(prog="tools/docs.py", description="Build the documentation.")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.add_argument("--serve", type=int, metavar="PORT", help="serve it on this machine until Ctrl-C")
    parser.add_argument("--fresh", action="store_true", help="build all pages, not only those that changed")
    options = parser.parse_args(arguments)
    findings = build(ROOT, is_fresh=options.fresh, shows_progress=True)
    print("\n".join(str(finding) for finding in findings))
    page = SITE / "index.html"
    if not page.exists():
        return 1
    print(f"built: {page}")
    if options.open:
        webbrowser.open(page.as_uri())
    if options.serve is not None:
        serve(options.serve)
    return 1 if findings else 0


def serve(port: int) -> None:
    """Serve the built site to this machine alone, until Ctrl-C."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(SITE))
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
