"""`peeklock jobs`: runs the jobs of the pipeline on this machine."""

from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from broker.cli.ending import FAILED, WRONG_USE, fail

JOBS_PACKAGE = "pipeline.jobs"  # imported by its name only: it is built on the broker, and not the other way round

jobs_app = typer.Typer(
    help="Reports over the ledger of a namespace: audit, dead letters, latency, usage; and changes of many messages: "
    "resubmission of dead letters, drain of a backlog. Needs Spark and Java.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@jobs_app.command("list")
def list_jobs() -> None:
    """Print the names of the jobs, each with what it does."""
    for name, what in import_module(JOBS_PACKAGE).TELLS.items():
        typer.echo(f"{name:<14}{what}")


@jobs_app.command(
    "run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def run_job(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of those that `peeklock jobs list` prints.")],
) -> None:
    """Run a job. All that follows its name goes to it: `peeklock jobs run audit --help` says what it takes.

    Exit codes: 0 done; 1 faults were found, with --fail-on-faults; 2 wrong use; 3 it could not be done.
    """
    jobs: dict[str, str] = import_module(JOBS_PACKAGE).JOBS
    if name not in jobs:
        fail(f"there is no job {name!r}; there are {', '.join(jobs)}", WRONG_USE)
    _require_packages()
    raise typer.Exit(import_module(jobs[name]).main(context.args))


@jobs_app.command("prepare")
def prepare() -> None:
    """Make jobs on this machine start faster: write an archive of Java's classes, of 200 MB, beside this installation.

    Takes a minute. Do it again when Java or Spark is another version: jobs do not use an archive that is too old.
    """
    _require_packages()
    raise typer.Exit(import_module(f"{JOBS_PACKAGE}.rehearsal").main())


def _require_packages() -> None:
    for package in ("pyspark", "jinja2", "matplotlib"):
        if find_spec(package) is None:
            fail(f"{package} is not installed: pip install 'peeklock[spark,jobs]'", FAILED)
