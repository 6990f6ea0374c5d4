"""``python -m lowtide``: the same as the command ``lowtide``."""

from lowtide.cli import main

if __name__ == "__main__":
    main()
