"""``python -m overlapctl``: the same as the ``overlapctl`` command."""

from overlapctl.cli import main

if __name__ == "__main__":
    main()
