"""``python -m hybridc``: the command line."""

from hybridc.cli.main import main

if __name__ == "__main__":
    main()
