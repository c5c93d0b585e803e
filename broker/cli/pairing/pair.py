"""`peeklock pair`: commands for paired namespaces."""

import typer

from broker.cli.pairing.cost import app as cost_app

pair_app = typer.Typer(help="Pair two namespaces.", no_args_is_help=True, rich_markup_mode=None)
pair_app.add_typer(cost_app)
