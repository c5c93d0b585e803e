"""`python -m broker.cli`: the command line without the script that an installation makes."""

from broker.cli.commands import main

main()
