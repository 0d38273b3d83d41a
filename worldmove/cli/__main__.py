"""`python -m worldmove.cli`: the command line of an interpreter that has no scripts folder."""

from worldmove.cli.main import main

main()
