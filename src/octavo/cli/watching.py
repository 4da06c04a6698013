"""`octavo watch`: a live page of a run."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.app import app, in_home, print_plain, user_errors
from octavo.cli.examples import EXAMPLES
from octavo.runtime.terminal import stdout


@app.command(epilog=EXAMPLES["watch"])
def watch(
    context: typer.Context,
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's output folder.", show_default=False, callback=in_home)
    ],
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port; default: the first free one from 8421 on.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; by default this machine alone.")] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Show a run in the browser while it trains.

    The page has the charts of the report, speed, MFU and memory beside their
    predictions, time, position in the data, samples, findings and moves of the
    autopilot. It follows the run's files: one that has not begun, goes on, was
    killed or has ended. Ctrl-C ends it; the run does not notice.
    """
    with user_errors(context):
        from octavo.experiments.live_run import LiveRun, run_folder
        from octavo.experiments.live_server import LiveServer

        folder = run_folder(run)
        with LiveServer(LiveRun(folder), host=host, port=port) as server:
            print_plain(stdout(), f"{folder} is shown at {server.url}  (Ctrl-C ends it)")
            if open_browser:
                import webbrowser

                webbrowser.open(server.url)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                return
