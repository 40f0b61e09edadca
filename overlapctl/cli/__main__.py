"""``python -m overlapctl.cli``."""

from overlapctl.cli import main

if __name__ == "__main__":
    main()
