"""`python -m broker.cli`: the command line without the script that an installation makes."""

from broker.cli.entry import main

main()
