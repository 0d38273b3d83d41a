"""`python -m worldmove` is the command `worldmove`, whatever the search path is."""

from worldmove.cli import main

if __name__ == "__main__":
    main()
